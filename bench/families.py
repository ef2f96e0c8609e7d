"""Compares one model's GGUF files in Corella and llama.cpp, by turns: prefill of 512 tokens, then decode.

    python bench/families.py target/release/corella …/llama.cpp/build/bin GGUF_FOLDER [ROUNDS [BATCHES]]

The folder has q8_0.gguf and q4_0.gguf, from `bench/compare/make_gguf.py`. Corella reads the same files in its own
format with the same number of bits. BATCHES are the numbers of requests that decode together, 1,8 by default.
"""

import statistics
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent / "compare"))
from corella_peer import Corella  # noqa: E402
from llama_peer import Llama  # noqa: E402

BINARY, LLAMA, FOLDER = map(Path, sys.argv[1:4])
ROUNDS = int(sys.argv[4]) if len(sys.argv) > 4 else 3
BATCHES = [int(batch) for batch in sys.argv[5].split(",")] if len(sys.argv) > 5 else [1, 8]
KINDS = {"Q8_0": "int8", "Q4_0": "int4"}


def main():
    speeds = {}
    for _ in range(ROUNDS):
        for kind, dtype in KINDS.items():
            ours = Corella(BINARY, FOLDER / f"{kind.lower()}.gguf", options=["--dtype", dtype, "--max-model-len", 1024])
            for name, peer in (("Corella", ours), ("llama.cpp", Llama(LLAMA, FOLDER, kind))):
                for what, speed in peer.offline([512], BATCHES).items():
                    print(f"{kind} {what}: {name} {speed:.1f} tokens/s", file=sys.stderr, flush=True)
                    speeds.setdefault((kind, what), {}).setdefault(name, []).append(speed)
    print("| | | Corella, tokens/s | llama.cpp, tokens/s | ratio (lowest to highest) |\n|---|---|---|---|---|")
    for (kind, what), by_name in speeds.items():
        ours, theirs = by_name["Corella"], by_name["llama.cpp"]
        ratios = [a / b for a, b in zip(ours, theirs)]
        print(
            f"| {kind} | {what} | {statistics.median(ours):.1f} | {statistics.median(theirs):.1f} "
            f"| {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) |"
        )


if __name__ == "__main__":
    main()
