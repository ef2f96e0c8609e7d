"""Compares values of one option, by turns. The defaults were chosen by these measurements.

    python bench/defaults.py target/release/corella --long FOLDER --large FOLDER [--runs 3] [CASE ...]

LONG is a small model with a context of at least 8k tokens, LARGE a model of real size
(bench/make_model.py small-32k and qwen3-0.6b).
"""

import argparse
import json
import statistics
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path

from scheduling import run

PORT = 8391
# name -> (model, the option, its values, further arguments); the other values are compared with the first
OFFLINE = {
    "page-size": ("long", "--block-size", [16, 4, 8, 32, 64, 128],
                  ["--num-prompts", "8", "--input-lens", "4000", "--max-tokens", "64"]),
    "step-tokens": ("large", "--max-num-batched-tokens", [512, 128, 256, 1024, 2048],
                    ["--num-prompts", "12", "--input-lens", "1024,64,64", "--max-tokens", "48", "--max-num-seqs", "64"]),
}
OFFLINE_MEASURES = [("TTFT p50, ms", "p50_ttft_ms"), ("TTFT p99, ms", "p99_ttft_ms"), ("ITL p99, ms", "p99_itl_ms"),
                    ("TPOT p50, ms", "p50_tpot_ms"), ("output tokens/s", "output_throughput")]
# Answers end by themselves after a third of their limit, and the pool has room for a tenth of the requests.
HEAD_ROOMS = [(value, ["--head-room", value]) for value in ("estimate", "limit", "0.5", "0.25", "0.125", "0")]
HEAD_ROOM_MEASURES = [("output tokens/s", "output_throughput"), ("TTFT p50, ms", "p50_ttft_ms"), ("TTFT p99, ms", "p99_ttft_ms"),
                  ("ITL p99, ms", "p99_itl_ms"), ("E2EL p99, ms", "p99_e2el_ms"), ("preemptions", "preemptions")]


def served(binary, server, load, counters):
    """Starts a server, and returns the results of `bench serve` and its counters: {name: prefix of the series}."""
    server = subprocess.Popen([binary, "serve", "--port", str(PORT), *server], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_ready()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "out.json"
            subprocess.run([binary, "bench", "serve", "--base-url", f"http://127.0.0.1:{PORT}", *load, "--output-json", path],
                           check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            result = json.loads(path.read_text())
        result.update({name: metric(series) for name, series in counters.items()})
    finally:
        server.terminate()
        server.wait()
    assert result["failed"] == 0, result
    return result


def wait_ready():
    for _ in range(200):
        try:
            return urllib.request.urlopen(f"http://127.0.0.1:{PORT}/ready", timeout=5).status
        except OSError:
            time.sleep(0.05)
    raise SystemExit("the server has not become ready")


def metric(name):
    text = urllib.request.urlopen(f"http://127.0.0.1:{PORT}/metrics", timeout=5).read().decode()
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))


def table(title, command, values, rounds, measures):
    print(f"\n## {title}, medians of {len(rounds)}\n\n`{command}`\n")
    print(f"| | {' | '.join(values)} |\n|{'---|' * (len(values) + 1)}")
    for name, key in measures:
        cells = []
        for at in range(len(values)):
            cell = f"{statistics.median(r[at][key] for r in rounds):.1f}"
            if at > 0 and key != "preemptions":
                cell += f" ({statistics.median(r[at][key] / r[0][key] for r in rounds):.2f} x)"
            cells.append(cell)
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("binary")
    parser.add_argument("cases", nargs="*")
    parser.add_argument("--long")
    parser.add_argument("--large")
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    for case in options.cases or [*OFFLINE, "head-room"]:
        if case in OFFLINE:
            model, option, values, rest = OFFLINE[case]
            folder = getattr(options, model)
            rounds = [[run(options.binary, [folder], [*rest, option, str(value)]) for value in values] for _ in range(options.runs)]
            table(case, f"corella bench offline {model.upper()} {' '.join(rest)} {option} N", list(map(str, values)), rounds, OFFLINE_MEASURES)
        else:
            with tempfile.NamedTemporaryFile("w", suffix=".txt") as prompts:
                animals = "fox bear cat dog rabbit mouse owl frog lion duck horse bird".split()
                things = "lantern kettle violin compass ladder basket".split()
                prompts.write("\n".join(f"Tell me a story about a {a} and a {t}." for a in animals for t in things) + "\n")
                prompts.flush()
                load = ["--endpoint", "chat", "--prompts", prompts.name, "--num-prompts", "576", "--max-concurrency", "64",
                        "--max-tokens", "384"]
                counters = {"preemptions": "corella_num_preemptions_total{"}
                rounds = [[served(options.binary, ["--kv-cache-memory", "12M", *arguments], load, counters) for _, arguments in HEAD_ROOMS]
                          for _ in range(options.runs)]
            table(case, "corella serve --kv-cache-memory 12M; 576 stories, 64 at a time, --max-tokens 384", [name for name, _ in HEAD_ROOMS],
                  rounds, HEAD_ROOM_MEASURES)


if __name__ == "__main__":
    main()
