"""Compares prefill and decode nodes with as many unified nodes, on the mock, whose steps take a set time.

    python bench/equal_hardware.py target/release/corella
    python bench/equal_hardware.py target/release/corella --prefill 3 --decode 1 --rates 20,30,40,50

A step takes --step-us, --token-us for each token of a prompt and --decode-us for each decoding request. The defaults are
Llama 3 8B on an H200 (bench/results/2026-11-27-h200.md). All times are multiplied by --slowdown, so that a few cores
have time for several nodes, and divided by it again in the tables. KV rows of the mock are small, so links are fast.

Requests arrive at random times, the same for all ways. A router gives them to unified nodes, or to prefill nodes, by
turns. The nodes needed are those at which 99 % of the requests keep the objective.
"""

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
from pathlib import Path

from disaggregation import Bench, quantile


def make_trace(options, rate, seed):
    """Returns arrival times in ms, with lengths of prompts and answers."""
    draw = random.Random(seed)
    at_ms, lines = 0.0, []
    for _ in range(options.num_requests):
        at_ms += 1e3 * options.slowdown * draw.expovariate(rate)
        lines.append({"timestamp": at_ms, "input_length": draw.randint(*options.prompt_tokens),
                      "output_length": draw.randint(*options.output_tokens)})
    return lines


def run(bench, options, way, trace):
    """Returns the requests' times as lists, in ms of the model: to the first token, per further token, to the last, and
    the longest gap; and how late requests were sent."""
    entries, groups = way
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(bench.servers(*nodes)) for nodes in groups]
        loads = []
        ports = [servers[group].ports[node] for group, node in entries]
        for at, port in enumerate(ports):
            part = trace[at::len(ports)]
            file = bench.folder / f"trace-{port}.jsonl"
            file.write_text("\n".join(map(json.dumps, part)) + "\n")
            out = bench.folder / f"out-{port}.json"
            command = [bench.binary, "bench", "serve", "--base-url", f"http://127.0.0.1:{port}", "--trace", file, "--ignore-eos",
                       "--num-prompts", len(part), "--num-warmups", 1, "--save-detailed", "--output-json", out]
            process = subprocess.Popen(list(map(str, command)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            loads.append((process, out))
        found = {"ttft": [], "tpot": [], "latency": [], "gap": [], "late": []}
        for process, out in loads:
            assert process.wait() == 0, "a load has failed"
            load = json.loads(out.read_text())
            assert load["failed"] == 0, load["errors"]
            ms = 1e3 / options.slowdown
            found["ttft"] += [ms * time for time in load["ttfts"]]
            found["latency"] += [ms * time for time in load["e2els"]]
            found["tpot"] += [ms * statistics.mean(gaps) for gaps in load["itls"]]
            found["gap"] += [ms * max(gaps) for gaps in load["itls"]]
            found["late"].append(load["p99_lag_ms"] / options.slowdown)
        has_roles = len(groups[0]) > 1
        num_sent = servers[0].metrics()["corella_pd_transfer_seconds_count"] if has_roles else 0
        assert not has_roles or num_sent >= 0.9 * len(trace) / len(ports), f"{num_sent:.0f} prompts were sent to decode nodes"
        return found


def share_kept(options, found):
    kept = [ttft <= options.ttft_ms and tpot <= options.tpot_ms for ttft, tpot in zip(found["ttft"], found["tpot"])]
    return sum(kept) / len(kept)


def highest_rate(points, wanted=0.99):
    """Returns the rate up to which the objective is kept, between the rates that were tried, and whether it may be
    higher. Returns `None` if the lowest is too high."""
    if points[0][1] < wanted:
        return None, False
    for (low, high_share), (high, low_share) in zip(points, points[1:]):
        if low_share < wanted:
            return low + (high - low) * (high_share - wanted) / (high_share - low_share), False
    return points[-1][0], True


def main():
    def bounds(text):
        low, _, high = text.partition("-")
        return int(low), int(high or low)

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary")
    parser.add_argument("--prefill", type=int, default=1)
    parser.add_argument("--decode", type=int, default=1)
    parser.add_argument("--rates", default="4,8,12,16", help="requests a second to all nodes together, in the model's time")
    parser.add_argument("--num-requests", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--prompt-tokens", type=bounds, default=(512, 1536))
    parser.add_argument("--output-tokens", type=bounds, default=(64, 192))
    parser.add_argument("--step-us", type=float, default=4500)
    parser.add_argument("--token-us", type=float, default=47)
    parser.add_argument("--decode-us", type=float, default=90)
    parser.add_argument("--slowdown", type=float, default=4)
    parser.add_argument("--step-tokens", type=int, default=2048)
    parser.add_argument("--ttft-ms", type=float, default=500)
    parser.add_argument("--tpot-ms", type=float, default=10)
    parser.add_argument("--whole", action="store_true", help="also unified nodes without chunks")
    options = parser.parse_args()
    times = [f"--mock-{name}-us={options.slowdown * micros:g}" for name, micros in
             (("step", options.step_us), ("token", options.token_us), ("decode", options.decode_us))]
    common = ("--device", "mock", *times, "--max-num-batched-tokens", options.step_tokens, "--no-enable-prefix-caching")
    num_nodes = options.prefill + options.decode
    alone = [((index, 0), [common]) for index in range(num_nodes)]
    whole = [((index, 0), [(*common, "--no-chunked-prefill")]) for index in range(num_nodes)]
    # Decode nodes answer between two steps, which are slower here than the default time allows.
    search = ("--decode-search-timeout", min(60_000, int(100 * options.slowdown)))
    roles = [("--role", role, *search, *common) for role, number in (("prefill", options.prefill), ("decode", options.decode))
             for _ in range(number)]
    ways = {
        f"{num_nodes} unified": tuple(zip(*alone)),
        f"{num_nodes} unified, whole prompts": tuple(zip(*whole)),
        f"{options.prefill} prefill, {options.decode} decode": ([(0, node) for node in range(options.prefill)], [roles]),
    }
    if not options.whole:
        del ways[f"{num_nodes} unified, whole prompts"]
    points = {name: [] for name in ways}
    low, high = options.prompt_tokens
    print(f"Prompts of {low} to {high} tokens, answers of {options.output_tokens[0]} to {options.output_tokens[1]}; a step of "
          f"{options.step_us:g} µs, {options.token_us:g} for each token of a prompt, {options.decode_us:g} for each decode, "
          f"{options.slowdown:g} times as slow; up to {options.step_tokens} tokens in a step; {options.num_requests} requests, "
          f"{options.rounds} rounds. Good: first token within {options.ttft_ms:g} ms, others every {options.tpot_ms:g} ms.\n")
    print("| requests/s | ms | TTFT mean | p99 | TPOT mean | p99 | longest gap p99 | latency mean | p99 | to the first row | good | sent late p99 |")
    print("|---|---|---|---|---|---|---|---|---|---|---|---|")
    with Bench(options.binary, []) as bench:
        for rate in map(float, options.rates.split(",")):
            found = {name: [] for name in ways}
            for round in range(options.rounds):
                trace = make_trace(options, rate, seed=round)
                for name in list(ways) if round % 2 == 0 else reversed(ways):
                    found[name].append(run(bench, options, ways[name], trace))
            base = None
            for name, rounds in found.items():
                merged = {key: [time for one in rounds for time in one[key]] for key in rounds[0]}
                latency = statistics.mean(merged["latency"]), quantile(merged["latency"], 0.99)
                base = base or latency
                share = share_kept(options, merged)
                points[name].append((rate, share))
                cells = [f"{rate:g}", name]
                for key in ("ttft", "tpot"):
                    cells += [f"{statistics.mean(merged[key]):.1f}", f"{quantile(merged[key], 0.99):.1f}"]
                cells += [f"{quantile(merged['gap'], 0.99):.0f}", f"{latency[0]:.0f}", f"{latency[1]:.0f}",
                          f"{latency[0] / base[0]:.2f}, {latency[1] / base[1]:.2f}", f"{100 * share:.1f} %", f"{max(merged['late']):.1f}"]
                print(f"| {' | '.join(cells)} |", flush=True)
    print("\n| | requests/s, 99 % good | nodes for 100 requests/s | to the first row |\n|---|---|---|---|")
    first = None
    for name in ways:
        rate, is_least = highest_rate(points[name])
        if rate is None:
            print(f"| {name} | < {points[name][0][0]:g} | | |")
            continue
        nodes = 100 * num_nodes / rate
        first = first or nodes
        print(f"| {name} | {'≥ ' if is_least else ''}{rate:.1f} | {'≤ ' if is_least else ''}{nodes:.1f} | {nodes / first:.2f} |")
    print(f"\nLoad of the machine: {os.getloadavg()[1]:.1f} over 5 minutes, {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
