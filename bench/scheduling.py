"""Runs each scheduling policy and its baseline by turns, and prints medians.

    python bench/scheduling.py target/release/corella [--model FOLDER] [--device cpu] [--runs 3] [CASE ...]

Cases with "mock" in their name need no model, and their steps take a fixed time. The others run MODEL on the
device, or the built-in model.
"""

import argparse
import json
import statistics
import subprocess
import tempfile
from pathlib import Path

PACK = ["--num-prompts", "128", "--input-lens", "512,1,1,1", "--max-tokens", "32", "--max-prefill-tokens", "256",
        "--max-num-batched-tokens", "1024", "--no-enable-prefix-caching"]
WHOLE = ["--no-chunked-prefill"]
PACKED = ["--prefill-admission-policy", "pack", "--prefill-admission-lookahead", "64", "--prefill-force-fifo-every", "8"]
PREFIX = ["--num-prompts", "16", "--input-lens", "900-915", "--shared-prefix", "--max-tokens", "1", "--max-prefill-seqs", "1",
          "--max-num-batched-tokens", "1024", "--max-prefill-tokens", "1024"]
PIPELINE = ["--num-prompts", "96", "--input-lens", "16", "--max-tokens", "64", "--max-num-seqs", "96", "--max-num-batched-tokens", "128"]
STEP = ["--device", "mock", "--mock-step-us", "20000"]
ROWS = ["--device", "mock", "--mock-step-us", "1000", "--mock-token-us", "100"]
STAGES = ["--device", "mock", "--mock-token-us", "800"]
FEW = ["--max-decode-seqs", "8"]

# name -> (arguments of both, arguments of the second alone, names of the two)
CASES = {
    "mock-pack": (STEP + PACK + WHOLE, PACKED, ("fifo", "pack")),
    "mock-pack-8-decodes": (STEP + PACK + WHOLE + FEW, PACKED, ("fifo", "pack")),
    "mock-pack-chunked": (STEP + PACK, PACKED, ("fifo", "pack")),
    "mock-prefix": (ROWS + PREFIX + ["--no-enable-prefix-caching"], None, ("cache off", "cache on")),
    "mock-pipeline": (STAGES + PIPELINE, ["--pipeline-parallel-size", "2"], ("depth 1", "2 stages")),
    "pack": (PACK + WHOLE, PACKED, ("fifo", "pack")),
    "pack-8-decodes": (PACK + WHOLE + FEW, PACKED, ("fifo", "pack")),
    "pack-chunked": (PACK, PACKED, ("fifo", "pack")),
    "prefix": (PREFIX + ["--no-enable-prefix-caching"], None, ("cache off", "cache on")),
}
MEASURES = [("TTFT p50, ms", "p50_ttft_ms"), ("TTFT p99, ms", "p99_ttft_ms"), ("TTFT p99 of the short prompts, ms", "short"),
            ("queue wait p50, ms", "p50_queue_ms"), ("prefill to first token p50, ms", "p50_prefill_ms"), ("TPOT p99, ms", "p99_tpot_ms"),
            ("ITL p99, ms", "p99_itl_ms"), ("output tokens/s", "output_throughput")]


def run(binary, model, arguments):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "out.json"
        subprocess.run([binary, "bench", "offline", *model, *arguments, "--output-json", path, "--save-detailed"],
                       check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        result = json.loads(path.read_text())
    assert result["failed"] == 0, result["errors"]
    short = sorted(ttft for length, ttft in zip(result["input_lens"], result["ttfts"]) if length == min(result["input_lens"]))
    result["short"] = 1e3 * short[min(len(short) - 1, int(0.99 * len(short)))]
    return result


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("binary")
    parser.add_argument("cases", nargs="*")
    parser.add_argument("--model")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    for case in options.cases or CASES:
        both, more, names = CASES[case]
        with_it = [a for a in both if a != "--no-enable-prefix-caching"] if more is None else both + more
        model = []
        if not case.startswith("mock"):
            model = [*([options.model] if options.model else []), "--device", options.device]
        pairs = [(run(options.binary, model, both), run(options.binary, model, with_it)) for _ in range(options.runs)]
        print(f"\n## {case}, medians of {options.runs}\n\n`corella bench offline {' '.join(with_it)}`\n")
        print(f"| | {names[0]} | {names[1]} | ratio |\n|---|---|---|---|")
        for title, key in MEASURES:
            before, after = (statistics.median(pair[side][key] for pair in pairs) for side in (0, 1))
            if before and after:
                ratio = statistics.median(pair[1][key] / pair[0][key] for pair in pairs if pair[0][key])
                print(f"| {title} | {before:.1f} | {after:.1f} | {ratio:.3f} |")


if __name__ == "__main__":
    main()
