"""Measures one model in several engines by turns: prefill of one prompt, decode of a batch.

    python bench/compare/by_turns.py out.json --corella target/release/corella --model FOLDER \\
        --vllm …/bin/python --ik …/ik_bench --gguf FILE --what 'prefill 512,decode b1' --rounds 3
    python bench/compare/by_turns.py out.json      # only prints the table

A round measures each engine once, so that Corella is not measured again for each of the others as in compare.py. Runs add
up in the file. make_model.py and make_hybrid_gguf.py make the model in both formats.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

from compare import Load
from corella_peer import Corella
from peer import CONTEXT, DECODED, THREADS, Missing, Peer, need
from vllm_peer import Vllm


class IkLlama(Peer):
    """ik_llama.cpp, with its weights as stored in the file or interleaved when read."""

    def __init__(self, program, gguf, repack):
        self.program, self.gguf, self.repack = program, gguf, repack
        self.name = "ik_llama.cpp" + (", repacked" if repack else "")

    def check(self):
        need(self.program, "build of ik_bench.cpp (--ik)")
        need(self.gguf, "GGUF file (--gguf)")

    def offline(self, prefills, batches):
        parts = (",".join(map(str, them)) for them in (prefills, batches))
        repack = "repack" if self.repack else "plain"
        return json.loads(self.run([self.program, self.gguf, THREADS, repack, *parts, CONTEXT, DECODED]))


def measure(options, results):
    ours = Corella(options.corella, options.model, "Corella", options.corella_options)
    # The other engines also warm up with a short prompt.
    ours.short_warm_up = True
    vllm = Vllm(options.vllm, options.model, "", options.vllm_preload)
    vllm.name = "vLLM"
    engines = []
    for engine in (ours, vllm, *(IkLlama(options.ik, options.gguf, repack) for repack in (False, True))):
        try:
            engine.check()
            engines.append(engine)
        except Missing as missing:
            print(f"{engine.name} is skipped: {missing}", file=sys.stderr)
    prefills = [int(what.split()[1]) for what in options.what if what.startswith("prefill")]
    batches = [int(what.split()[1][1:]) for what in options.what if what.startswith("decode")]
    try:
        for _ in range(options.rounds):
            for engine in engines:
                load = Load()
                speeds, others = engine.offline(prefills, batches), load.of_others()
                print(engine.name, json.dumps(speeds), f"others {others:.3f}", file=sys.stderr, flush=True)
                results += [{"what": what, "engine": engine.name, "speed": it, "others": others} for what, it in speeds.items()]
                options.out.write_text(json.dumps(results, indent=1) + "\n")
    finally:
        for engine in engines:
            engine.close()


def table(results):
    names = list(dict.fromkeys(run["engine"] for run in results))
    print("| tokens/s | " + " | ".join(names) + " | of the best other | others' share of the cores |")
    print("|---|" + "---|" * (len(names) + 2))
    for what in dict.fromkeys(run["what"] for run in results):
        runs = [run for run in results if run["what"] == what]
        speeds = {name: [run["speed"] for run in runs if run["engine"] == name] for name in names}
        medians = {name: statistics.median(them) for name, them in speeds.items() if them}
        best = max((speed for name, speed in medians.items() if name != "Corella"), default=None)
        ratio = f"**× {medians['Corella'] / best:.2f}**" if best and "Corella" in medians else ""
        cells = [f"{medians[it]:.1f} ({min(speeds[it]):.1f}–{max(speeds[it]):.1f})" if speeds[it] else "" for it in names]
        others = [run["others"] for run in runs]
        print(f"| {what} | {' | '.join(cells)} | {ratio} | {min(others):.0%} to {max(others):.0%} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="file that the numbers of all runs are added to")
    parser.add_argument("--corella", help="binary")
    parser.add_argument("--corella-options", type=str.split, default=[], help="further options, in one argument")
    parser.add_argument("--model", help="folder of bench/make_model.py")
    parser.add_argument("--vllm", help="Python that has vLLM")
    parser.add_argument("--vllm-preload", help="LD_PRELOAD for vLLM")
    parser.add_argument("--ik", help="program of ik_bench.cpp")
    parser.add_argument("--gguf", help="file of make_hybrid_gguf.py")
    parser.add_argument("--what", type=lambda text: text.split(","), default=[], help="cells, e.g. 'prefill 512,decode b8'")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    results = json.loads(options.out.read_text()) if options.out.exists() else []
    measure(options, results)
    table(results)


if __name__ == "__main__":
    main()
