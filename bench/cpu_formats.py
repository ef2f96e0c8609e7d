"""Measures weights in bf16, int8 and int4 on AMX and AVX-512, by turns: prefill and decode of one request, then decode of
8 and 32 requests, with their shares of the machine's limits in the same round.

    python bench/cpu_formats.py target/release/corella MODEL [ROUNDS [ISA,…]]
"""

import json
import re
import statistics
import subprocess
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent / "compare"))
from corella_peer import Corella  # noqa: E402
from peer import BATCHES, CONTEXT, DECODED  # noqa: E402

BINARY, MODEL = sys.argv[1:3]
ROUNDS = int(sys.argv[3]) if len(sys.argv) > 3 else 5
ISAS = sys.argv[4].split(",") if len(sys.argv) > 4 else ("amx", "avx512")
SETTINGS = [(dtype, isa) for dtype in ("bf16", "int8", "int4") for isa in ISAS]
SPEED = re.compile(r"(prefill|decode)\s+\d+ tokens\s+[\d.]+ s\s+([\d.]+) tokens/s\s+([\d.]+) of ([\d.]+) .*\((\d+) %\)")


def generate(dtype, isa, num_tokens, max_tokens):
    """Returns for prefill and decode: tokens/s, the speed in the unit of the limit, the limit, and the share."""
    command = [BINARY, "generate", MODEL, "--ignore-eos", "--threads", "2", "--dtype", dtype, "--isa", isa,
               "--prompt-tokens", str(num_tokens), "--max-tokens", str(max_tokens)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stderr.splitlines()
    return {m[1]: tuple(map(float, m.groups()[1:])) for m in map(SPEED.match, lines) if m}


def kv_bytes():
    """Returns the bytes of a token's keys and values in bf16."""
    config = json.loads((Path(MODEL) / "config.json").read_text())
    return 2 * 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]


def main():
    speeds = {}
    for _ in range(ROUNDS):
        for dtype, isa in SETTINGS:
            def note(what, speed, share):
                speeds.setdefault((what, dtype, isa), []).append((speed, share))

            for length in (512, 2048):
                speed, _, _, share = generate(dtype, isa, length, 1)["prefill"]
                note(f"prefill {length}", speed, share)
            speed, used, limit, share = generate(dtype, isa, CONTEXT, 1 + DECODED)["decode"]
            note("decode b1", speed, share)
            # A step reads all weights once, and the keys and values of each request.
            kv = kv_bytes() * (CONTEXT + DECODED / 2)
            weights = used * 1e9 / speed - kv
            for batch in BATCHES[1:]:
                speed = Corella(BINARY, MODEL, options=["--dtype", dtype, "--isa", isa]).offline((), (batch,))
                speed = speed[f"decode b{batch}"]
                note(f"decode b{batch}", speed, 100 * speed / batch * (weights + batch * kv) / (limit * 1e9))
    median = statistics.median
    print("| | weights | | tokens/s (lowest to highest) | share of the limit |\n|---|---|---|---|---|")
    for (what, dtype, isa), runs in speeds.items():
        low, high = min(runs)[0], max(runs)[0]
        print(f"| {what} | {dtype} | {isa} | {median(speed for speed, _ in runs):.0f} ({low:.0f} to {high:.0f}) "
              f"| {median(share for _, share in runs):.0f} % ({min(share for _, share in runs):.0f} to "
              f"{max(share for _, share in runs):.0f}) |")


main()
