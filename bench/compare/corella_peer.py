"""Measures Corella itself, from a release build."""

import json
import tempfile
from pathlib import Path

from peer import CONTEXT, DECODED, THREADS, Peer, need


class Corella(Peer):
    short_warm_up = False

    def __init__(self, binary, model, name="Corella bf16", options=()):
        self.binary, self.model, self.name, self.options = binary, model, name, list(options)

    def check(self):
        need(self.binary, "release build of Corella (--corella)")
        need(self.model, "model folder (--model)")

    def version(self):
        return self.run([self.binary, "--version"]).strip()

    def bench(self, *load):
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "report.json"
            self.run([self.binary, "bench", "offline", self.model, "--threads", THREADS, "--no-enable-prefix-caching",
                      "--save-detailed", "--output-json", out, *self.options, *load])  # fmt: skip
            report = json.loads(out.read_text())
        assert not report["failed"], report["errors"]
        return report

    def offline(self, prefills, batches):
        speeds = {}
        if prefills:
            # Requests run one after the other; the first of each length is the warm-up, or a short one for all.
            warm_ups = [CONTEXT] if self.short_warm_up else list(prefills)
            report = self.bench("--num-prompts", len(warm_ups) + len(prefills), "--max-num-seqs", 1, "--max-tokens", 1,
                                "--input-lens", ",".join(map(str, warm_ups + list(prefills))))  # fmt: skip
            times = [first - queued for first, queued in zip(report["ttfts"], report["queue_times"])]
            for length, time in zip(prefills, times[len(warm_ups) :]):
                speeds[f"prefill {length}"] = length / time
        for batch in batches:
            # The first requests are the warm-up, because other servers clear their KV memory at start or stay running.
            report = self.bench("--num-prompts", 2 * batch, "--max-num-seqs", batch, "--input-lens", CONTEXT,
                                "--max-tokens", DECODED + 1)  # fmt: skip
            speeds[f"decode b{batch}"] = decode_speed(report, batch)
        return speeds

    def serve_command(self, port):
        return [self.binary, "serve", self.model, "--threads", THREADS, "--port", port, *self.options]


def decode_speed(report, first):
    """Returns tokens/s of the requests from `first` on, between the last first token and the first last token."""
    streams = []
    for start, ttft, itls in list(zip(report["start_times"], report["ttfts"], report["itls"]))[first:]:
        times = [start + ttft]
        for itl in itls:
            times.append(times[-1] + itl)
        streams.append(times)
    began, ended = max(times[0] for times in streams), min(times[-1] for times in streams)
    return sum(began < time <= ended for times in streams for time in times) / (ended - began)
