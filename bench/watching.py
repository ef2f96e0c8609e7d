"""Measures the cost of watching the engine: throughput and CPU time with and without a reader of `/engine/events`.

    python3 bench/watching.py --binary target/release/corella [--rounds 8] [-- ARGUMENTS OF SERVE]

First an idle server is watched, which gives the cost of a snapshot. Then rounds under load with and without a reader
alternate, against one server.
"""

import argparse
import contextlib
import json
import socket
import statistics
import subprocess
import tempfile
import threading
import time
import urllib.request
from pathlib import Path


# After its start a server still works on its caches.
SETTLE_S = 10
IDLE_S = 20


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", default="target/release/corella")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("serve", nargs="*", help="arguments of corella serve")
    arguments = parser.parse_args()
    with server(arguments) as (process, url):
        time.sleep(SETTLE_S)
        print_cost_of_snapshot(process, url)
        load(arguments, url)
        rounds = {False: [], True: []}
        for number in range(2 * arguments.rounds):
            # The order changes from one pair of rounds to the next.
            is_watched = number % 4 in (1, 2)
            rounds[is_watched].append(measure(arguments, process, url, is_watched))
        report(rounds)


@contextlib.contextmanager
def server(arguments):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [arguments.binary, "serve", *arguments.serve, "--port", str(port)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(url + "/ready"):
                break
            assert process.poll() is None, "the server has ended"
            time.sleep(0.05)
        yield process, url
    finally:
        process.kill()
        process.wait()


def print_cost_of_snapshot(process, url):
    unwatched = cpu_of(process, IDLE_S)
    num_snapshots, is_over = [], threading.Event()
    watcher = threading.Thread(target=watch, args=(url, is_over, num_snapshots))
    watcher.start()
    time.sleep(1)
    before = len(num_snapshots)
    watched = cpu_of(process, IDLE_S)
    num = len(num_snapshots) - before
    is_over.set()
    watcher.join()
    print(f"idle, {IDLE_S} s: {1000 * unwatched:.1f} ms of CPU time without a reader, {1000 * watched:.1f} ms with one")
    print(f"a snapshot: {1000 * (watched - unwatched) / num:.2f} ms of CPU time ({num} were read)")


def cpu_of(process, seconds):
    before = cpu_seconds(process)
    time.sleep(seconds)
    return cpu_seconds(process) - before


def measure(arguments, process, url, is_watched):
    """Returns tokens per second, the server's CPU time per token, and the number of snapshots read."""
    num_snapshots = []
    is_over = threading.Event()
    watcher = threading.Thread(target=watch, args=(url, is_over, num_snapshots))
    if is_watched:
        watcher.start()
        time.sleep(0.5)
    before = cpu_seconds(process)
    result = load(arguments, url)
    cpu_s = cpu_seconds(process) - before
    is_over.set()
    if is_watched:
        watcher.join()
    num_tokens = result["total_output_tokens"]
    return result["output_throughput"], 1e6 * cpu_s / num_tokens, len(num_snapshots)


def watch(url, is_over, num_snapshots):
    with urllib.request.urlopen(url + "/engine/events") as stream:
        for line in stream:
            if line == b"event: snapshot\n":
                num_snapshots.append(line)
            if is_over.is_set():
                return


def load(arguments, url):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.json"
        command = [arguments.binary, "bench", "serve", "--base-url", url, "--prompt-tokens", "64"]
        command += ["--max-tokens", "64", "--ignore-eos", "--num-prompts", str(arguments.prompts)]
        command += ["--max-concurrency", str(arguments.concurrency), "--output-json", str(path)]
        subprocess.run(command, check=True, capture_output=True)
        return json.loads(path.read_text())


def cpu_seconds(process):
    """Returns the CPU time of all threads, to the nanosecond."""
    threads = Path(f"/proc/{process.pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


def report(rounds):
    print("| | tokens/s | CPU time of the server for a token, µs | snapshots read in a round |")
    print("|---|---|---|---|")
    for is_watched, name in [(False, "nobody watches"), (True, "one reader")]:
        columns = [f"{statistics.median(column):.1f} ({min(column):.1f}–{max(column):.1f})" for column in zip(*rounds[is_watched])]
        print(f"| {name} | {' | '.join(columns)} |")
    for column, name in enumerate(["throughput", "CPU time"]):
        ratios = [on[column] / off[column] for off, on in zip(rounds[False], rounds[True])]
        print(f"median ratio of {name}, watched / not watched: {statistics.median(ratios):.4f}")


if __name__ == "__main__":
    main()
