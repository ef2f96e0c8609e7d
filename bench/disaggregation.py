"""Measures a prefill node and a decode node on this machine beside one process with both roles.

    python bench/make_model.py small-32k small-24l
    python bench/disaggregation.py ttft target/release/corella [--model MODEL] [--rounds 5]
    python bench/disaggregation.py silence target/release/corella [--rounds 5]
    python bench/disaggregation.py hidden target/release/corella --model bench/models/small-24l
    python bench/disaggregation.py interference target/release/corella --model bench/models/small-32k --svg gaps.svg

ttft: time to the first token of lone requests. silence: the same, each after 30 s of silence. hidden: the share of a
transfer that is over when the last layer is computed, with a link so slow that the transfer takes half as long as the
prefill. interference: gaps between the tokens of eight streams while prompts of 4,096 tokens arrive.
"""

import argparse
import collections
import contextlib
import json
import math
import statistics
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

from node_process import free_port

NUM_STREAMS = 8
COLOURS = ("#1f77b4", "#ff7f0e", "#d62728", "#2ca02c")


class Servers:
    """One process, or a prefill node and a decode node, of which clients talk to the first."""

    def __init__(self, binary, model, nodes, folder):
        self.ports = [free_port() for _ in nodes]
        self.port = self.ports[0]
        self._nodes = []
        for port, options in zip(self.ports, nodes):
            registry = ["--registry", f"file:{folder}"] if len(nodes) > 1 else []
            command = [binary, "serve", *model, "--port", str(port), *registry, *map(str, options)]
            self._nodes.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        for port in reversed(self.ports):
            self._wait_ready(port)
        if len(nodes) > 1:
            # Nodes report their load to each other once a second.
            time.sleep(2)

    def _wait_ready(self, port):
        while True:
            assert all(node.poll() is None for node in self._nodes), "a server has ended"
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/ready").read()
                return
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.05)

    def metrics(self):
        """Returns the metrics of the clients' node, each summed over its labels."""
        sums = collections.Counter()
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics") as lines:
            for line in lines:
                if not line.startswith(b"#"):
                    name, value = line.decode().rsplit(" ", 1)
                    sums[name.split("{")[0]] += float(value)
        return sums

    def mean(self, name):
        """Returns the mean of a histogram of the prefill node."""
        metrics = self.metrics()
        return metrics[f"{name}_sum"] / max(1, metrics[f"{name}_count"])

    def stop(self):
        for node in self._nodes:
            node.terminate()
        for node in self._nodes:
            node.wait()


class Bench:
    """Starts servers and puts load on them with `corella bench serve`."""

    def __init__(self, binary, model):
        self.binary = binary
        self.model = model
        self._stack = contextlib.ExitStack()
        self.folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        self._num_files = 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._stack.close()

    @contextlib.contextmanager
    def servers(self, *nodes):
        self._num_files += 1
        servers = Servers(self.binary, self.model, nodes, self.folder / f"registry-{self._num_files}")
        try:
            yield servers
        finally:
            servers.stop()

    def start_load(self, port, *options):
        """Returns a function that waits for the load's end and returns its results."""
        self._num_files += 1
        file = self.folder / f"{self._num_files}.json"
        command = [self.binary, "bench", "serve", "--base-url", f"http://127.0.0.1:{port}", "--unique-prompts", "--ignore-eos"]
        command += ["--save-detailed", "--output-json", str(file), *map(str, options)]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

        def finish():
            assert process.wait() == 0, command
            results = json.loads(file.read_text())
            assert results["failed"] == 0, results["errors"]
            return results

        return finish

    def load(self, port, *options):
        return self.start_load(port, *options)()


def pair(transport, *options):
    """Returns the options of a prefill node and a decode node. Each has one thread, like the process beside them."""
    of_both = ("--transport", transport, "--threads", 1, *options)
    return [("--role", "prefill", *of_both), ("--role", "decode", *of_both)]


def median(values):
    return statistics.median(list(values))


def quantile(values, share):
    values = sorted(values)
    return values[min(len(values) - 1, int(share * len(values)))]


def ttft(bench, options):
    """Measures lone requests, by turns with one process and with pairs."""
    ways = {"one process": [("--threads", 1)], "pair, tcp": pair("tcp"), "pair, shm": pair("shm")}
    found = {name: [] for name in ways}
    for round in range(options.rounds):
        for name in list(ways) if round % 2 == 0 else reversed(ways):
            with bench.servers(*ways[name]) as servers:
                load = bench.load(servers.port, "--prompt-tokens", options.prompt_tokens, "--max-tokens", 4,
                                  "--num-prompts", 30, "--max-concurrency", 1, "--num-warmups", 2)
                times = [quantile(load["ttfts"], share) * 1e3 for share in (0.5, 0.99)]
                stages = [0.0, 0.0]
                if name != "one process":
                    assert servers.metrics()["corella_pd_transfer_seconds_count"] >= 30, "requests stayed at the prefill node"
                    stages = [servers.mean(f"corella_pd_{stage}_seconds") * 1e3 for stage in ("allocate", "handover")]
                found[name].append(times + stages)
    print(f"Lone requests of {options.prompt_tokens} tokens, ms, medians of {options.rounds} rounds of 30\n")
    print("| | TTFT p50 | to one process | TTFT p99 | allocate | first to second token |\n|---|---|---|---|---|---|")
    for name, rounds in found.items():
        ratio = median(own[0] / alone[0] for own, alone in zip(rounds, found["one process"]))
        p50, p99, allocate, handover = (median(column) for column in zip(*rounds))
        print(f"| {name} | {p50:.2f} | {ratio:.3f} | {p99:.2f} | {allocate:.2f} | {handover:.2f} |")


def silence(bench, options):
    """All servers are silent for 30 s and then have one request each, in turn."""
    ways = {"one process": [("--threads", 1)], "pair, tcp": pair("tcp"), "pair, shm": pair("shm")}
    found = {name: [] for name in ways}
    with contextlib.ExitStack() as stack:
        servers = {name: stack.enter_context(bench.servers(*nodes)) for name, nodes in ways.items()}
        for name in ways:
            bench.load(servers[name].port, "--prompt-tokens", options.prompt_tokens, "--max-tokens", 4, "--num-prompts", 3,
                       "--max-concurrency", 1, "--num-warmups", 0)
        for round in range(options.rounds):
            time.sleep(30)
            for name in list(ways) if round % 2 == 0 else reversed(ways):
                load = bench.load(servers[name].port, "--prompt-tokens", options.prompt_tokens, "--max-tokens", 4,
                                  "--num-prompts", 1, "--num-warmups", 0, "--seed", 100 + round)
                found[name].append(load["ttfts"][0] * 1e3)
        for name in list(ways)[1:]:
            num_transfers = servers[name].metrics()["corella_pd_transfer_seconds_count"]
            assert num_transfers == 3 + options.rounds, f"{name}: {num_transfers:.0f} transfers"
    print(f"A request of {options.prompt_tokens} tokens after 30 s of silence, TTFT in ms\n")
    print("| | median | to one process | all |\n|---|---|---|---|")
    for name, times in found.items():
        ratio = median(own / alone for own, alone in zip(times, found["one process"]))
        print(f"| {name} | {median(times):.2f} | {ratio:.3f} | {', '.join(f'{time:.1f}' for time in times)} |")


def hidden(bench, options):
    """The first run has no bandwidth limit, to measure the prefill's time and the bytes sent."""
    load = ("--prompt-tokens", options.prompt_tokens, "--max-tokens", 4, "--num-prompts", 10, "--max-concurrency", 1)

    def measure(transport, *limit):
        with bench.servers(*pair(transport, *limit)) as servers:
            bench.load(servers.port, *load)
            num_bytes = servers.metrics()["corella_kv_sent_bytes_total"]
            names = ("prefill_seconds", "transfer_seconds", "transfer_hidden_share", "handover_seconds")
            return [num_bytes / 10, *(servers.mean(f"corella_pd_{name}") for name in names)]

    print(f"Prompts of {options.prompt_tokens} tokens; medians of {options.rounds} runs of 10\n")
    print("| | MB/s | prefill, ms | first byte to last, ms | hidden share | first to second token, ms |\n|---|---|---|---|---|---|")
    for transport in ("tcp", "shm"):
        free = [measure(transport) for _ in range(options.rounds)]
        num_bytes, prefill_s = median(run[0] for run in free), median(run[1] for run in free)
        bandwidth = int(num_bytes / (prefill_s / 2))
        slow = [measure(transport, "--transfer-max-bandwidth", bandwidth) for _ in range(options.rounds)]
        for name, runs, speed in (("no limit", free, "—"), ("half of the prefill", slow, f"{bandwidth / 1e6:.0f}")):
            _, prefill, transfer, share, handover = (median(column) for column in zip(*runs))
            print(f"| {transport}, {name} | {speed} | {prefill * 1e3:.1f} | {transfer * 1e3:.1f} | {share:.2f} | {handover * 1e3:.1f} |")


def interference(bench, options):
    """Runs eight streams, and a long prompt every few seconds."""
    length = options.prompt_tokens
    whole = ("--no-chunked-prefill", "--max-num-batched-tokens", length + 64)
    chunks = ("--max-num-batched-tokens", 256)
    common = ("--max-num-seqs", 16, "--no-enable-prefix-caching")
    ways = {
        "one process, 2 threads, whole": [("--threads", 2, *whole, *common)],
        "one process, 2 threads, chunks": [("--threads", 2, *chunks, *common)],
        "pair, 1 thread each, whole": pair("auto", *whole, *common),
        "pair, 1 thread each, chunks": pair("auto", *chunks, *common),
    }
    found = {name: [] for name in ways}
    for round in range(options.rounds):
        for name in list(ways) if round % 2 == 0 else reversed(ways):
            with bench.servers(*ways[name]) as servers:
                bench.load(servers.port, "--prompt-tokens", 64, "--max-tokens", 8, "--num-prompts", 4)
                streams = bench.start_load(servers.port, "--prompt-tokens", 64, "--max-tokens", options.stream_tokens,
                                           "--num-prompts", NUM_STREAMS)
                time.sleep(1)
                long = bench.start_load(servers.port, "--prompt-tokens", length, "--max-tokens", 16, "--num-prompts",
                                        options.num_long, "--submit-interval", options.interval_ms, "--seed", 7)
                found[name].append((streams(), long()))
    print(f"{NUM_STREAMS} streams of {options.stream_tokens} tokens; {options.num_long} prompts of {length} tokens, one every "
          f"{options.interval_ms / 1e3:g} s; chunks of 256 tokens; medians of {options.rounds} runs, ms\n")
    print("| | gap p50 | gap p99 | longest gap | to the first row | stream mean, s | stream p99, s | long TTFT p50 | long latency p50 |")
    print("|---|---|---|---|---|---|---|---|---|")
    base = None
    for name, runs in found.items():
        rows = []
        for streams, long in runs:
            gaps = [gap * 1e3 for itls in streams["itls"] for gap in itls]
            rows.append([quantile(gaps, 0.5), quantile(gaps, 0.99), max(gaps), statistics.mean(streams["e2els"]),
                         quantile(streams["e2els"], 0.99), quantile(long["ttfts"], 0.5) * 1e3, quantile(long["e2els"], 0.5) * 1e3])
        base = base or rows
        ratio = median(own[2] / first[2] for own, first in zip(rows, base))
        p50, p99, longest, mean, most, ttft_ms, latency = (median(column) for column in zip(*rows))
        print(f"| {name} | {p50:.2f} | {p99:.2f} | {longest:.0f} | {ratio:.3f} | {mean:.2f} | {most:.2f} | {ttft_ms:.0f} | {latency:.0f} |")
    if options.svg:
        options.svg.write_text(plot({name: runs[0][0] for name, runs in found.items()}))


def plot(runs):
    """Returns an SVG with a row for each way: the gaps between the tokens of all streams over time, on a logarithmic
    scale."""
    width, height, left, space, decades = 760, 110, 60, 40, (1, 10, 100, 1000, 10000)
    end_s = max(start + sum([ttft, *itls]) for run in runs.values()
                for start, ttft, itls in zip(run["start_times"], run["ttfts"], run["itls"]))
    parts = []

    def y_of(gap_ms, top):
        return top + height * (1 - min(1, math.log10(max(gap_ms, 1)) / 4))

    for row, (name, run) in enumerate(runs.items()):
        top = row * (height + space) + space
        parts.append(f'<text x="{left}" y="{top - 8}">{name}: gap between tokens, ms</text>')
        for value in decades:
            y = y_of(value, top)
            parts.append(f'<path d="M{left} {y:.1f}H{width}" stroke="#e4e4e4"/>')
            parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{value}</text>')
        for start, ttft_s, itls in zip(run["start_times"], run["ttfts"], run["itls"]):
            at, dots = start + ttft_s, []
            for index, gap in enumerate(itls):
                at += gap
                # Short gaps are alike: a few of them are enough.
                if gap > 0.02 or index % 10 == 0:
                    dots.append(f"M{left + (width - left) * at / end_s:.1f} {y_of(gap * 1e3, top):.1f}h1.2")
            parts.append(f'<path d="{"".join(dots)}" stroke="{COLOURS[row % len(COLOURS)]}" stroke-width="1.4"/>')
    bottom = len(runs) * (height + space) + space // 2
    parts.append(f'<text x="{width}" y="{bottom}" text-anchor="end">{end_s:.0f} s</text>')
    return (f'<svg xmlns="http://www.w3.org/2000/svg" width="{width + 20}" height="{bottom + 12}">'
            f'<style>text{{font:12px system-ui,sans-serif}}</style>{"".join(parts)}</svg>\n')


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("ttft", "silence", "hidden", "interference"))
    parser.add_argument("binary")
    parser.add_argument("--model", help="a model folder; without it, the built-in model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt-tokens", type=int)
    parser.add_argument("--stream-tokens", type=int, default=2500)
    parser.add_argument("--num-long", type=int, default=4)
    parser.add_argument("--interval-ms", type=int, default=3000)
    parser.add_argument("--svg", type=Path)
    options = parser.parse_args()
    defaults = {"ttft": 1500, "silence": 1500, "hidden": 1024, "interference": 4096}
    options.prompt_tokens = options.prompt_tokens or defaults[options.what]
    model = [options.model] if options.model else []
    with Bench(options.binary, model) as bench:
        {"ttft": ttft, "silence": silence, "hidden": hidden, "interference": interference}[options.what](bench, options)


if __name__ == "__main__":
    main()
