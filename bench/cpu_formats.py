"""Weights in bf16, int8 and int4 on AMX and AVX-512, by turns: prefill and decode of one request with their
shares of the machine's limits, then 8 and 32 requests at once.

    python bench/cpu_formats.py target/release/corella MODEL [ROUNDS]
"""

import json
import re
import statistics
import subprocess
import sys
import tempfile

BINARY, MODEL = sys.argv[1:3]
ROUNDS = int(sys.argv[3]) if len(sys.argv) > 3 else 5
SETTINGS = [(dtype, isa) for dtype in ("bf16", "int8", "int4") for isa in ("amx", "avx512")]
SPEED = re.compile(r"(prefill|decode)\s+\d+ tokens\s+[\d.]+ s\s+([\d.]+) tokens/s.*\((\d+) %\)")


def generate(dtype, isa, num_tokens, max_tokens):
    command = [BINARY, "generate", MODEL, "--ignore-eos", "--threads", "2", "--dtype", dtype, "--isa", isa,
               "--prompt-tokens", str(num_tokens), "--max-tokens", str(max_tokens)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stderr.splitlines()
    return {m[1]: (float(m[2]), int(m[3])) for m in map(SPEED.match, lines) if m}


def offline(dtype, isa, num_prompts):
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        subprocess.run([BINARY, "bench", "offline", MODEL, "--threads", "2", "--dtype", dtype, "--isa", isa,
                        "--num-prompts", str(num_prompts), "--input-lens", "16", "--max-tokens", "48",
                        "--output-json", file.name], capture_output=True, check=True)
        report = json.load(open(file.name))
    return report["output_throughput"], report["median_tpot_ms"]


def main():
    single, loaded = {}, {}
    for _ in range(ROUNDS):
        for dtype, isa in SETTINGS:
            for phase, speed in generate(dtype, isa, 512, 48).items():
                single.setdefault((f"{phase} 512", dtype, isa), []).append(speed)
            if isa == "amx":
                long = generate(dtype, isa, 2048, 1)["prefill"]
                single.setdefault(("prefill 2048", dtype, isa), []).append(long)
            for num_prompts in (8, 32):
                loaded.setdefault((num_prompts, dtype, isa), []).append(offline(dtype, isa, num_prompts))
    median = statistics.median
    print("| | weights | | tokens/s (lowest to highest) | share of the limit |\n|---|---|---|---|---|")
    for (phase, dtype, isa), runs in sorted(single.items()):
        speeds = [speed for speed, _ in runs]
        print(f"| {phase} | {dtype} | {isa} | {median(speeds):.0f} ({min(speeds):.0f} to {max(speeds):.0f}) "
              f"| {median(share for _, share in runs):.0f} % |")
    print("\n| requests | weights | | output tokens/s | TPOT p50, ms |\n|---|---|---|---|---|")
    for (num_prompts, dtype, isa), runs in sorted(loaded.items()):
        print(f"| {num_prompts} | {dtype} | {isa} | {median(s for s, _ in runs):.0f} | {median(t for _, t in runs):.1f} |")


main()
