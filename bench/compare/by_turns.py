"""Measures one model in several engines by turns, cell by cell: prefill of one prompt, decode of some requests.

    python bench/compare/by_turns.py out.json --corella target/release/corella --model FOLDER \\
        --vllm …/bin/python --ik …/ik_llama.cpp/build/bin --gguf FILE --what 'prefill 512,decode b1' --rounds 3
    python bench/compare/by_turns.py out.json      # only prints the table

A round measures each engine once, so that Corella is not measured again for each of the others as in compare.py. Runs add
up in the file. The options of make_model.py and make_hybrid_gguf.py make the model in both formats.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import peer as peers
from compare import Load
from corella_peer import Corella
from llama_peer import Llama
from peer import Missing, need
from vllm_peer import Vllm


class IkLlama(Llama):
    """ik_llama.cpp, whose llama-batched-bench prints a table. --ik-options are for its own options."""

    def __init__(self, binaries, gguf, options):
        super().__init__(binaries, None, "")
        self.name, self.gguf, self.options = "ik_llama.cpp", gguf, options

    def check(self):
        need(self.binaries / "llama-batched-bench", "llama-batched-bench (--ik)")
        need(self.gguf, "GGUF file (--gguf)")

    def bench(self, context, prompts, decoded, batches, *_):
        # Without -pps: states of recurrent layers are not copied from one sequence to others.
        command = [self.binaries / "llama-batched-bench", "-m", self.gguf, "-t", peers.THREADS, "-c", context, "-ntg", decoded,
                   "-npp", ",".join(map(str, prompts)), "-npl", ",".join(map(str, batches)), *self.options]  # fmt: skip
        # The table is on standard error, and a log file in the current folder.
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run(
                [str(part) for part in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder
            )
        if done.returncode:
            raise RuntimeError(f"{self.name} ended with {done.returncode}\n{done.stdout[-2000:]}")
        found = re.findall(r"^\|" + r" *([\d.]+) \|" * 10, done.stdout, re.M)
        return [{"pp": int(row[0]), "pl": int(row[2]), "speed_pp": float(row[5]), "speed_tg": float(row[7])} for row in found]


def measure(options, results):
    engines = []
    for engine in (
        Corella(options.corella, options.model, "Corella", options.corella_options),
        Vllm(options.vllm, options.model, "", options.vllm_preload),
        IkLlama(options.ik, options.gguf, options.ik_options),
    ):
        try:
            engine.check()
            engines.append(engine)
        except Missing as missing:
            print(f"{engine.name} is skipped: {missing}", file=sys.stderr)
    try:
        for what in options.what:
            kind, number = what.split()
            part = ((int(number),), ()) if kind == "prefill" else ((), (int(number[1:]),))
            for _ in range(options.rounds):
                for engine in engines:
                    load = Load()
                    (speed,) = engine.offline(*part).values()
                    run = {"what": what, "engine": engine.name.strip(), "speed": speed, "others": load.of_others()}
                    print(json.dumps(run), file=sys.stderr, flush=True)
                    results.append(run)
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
    parser.add_argument("--ik", help="folder of ik_llama.cpp's binaries")
    parser.add_argument("--ik-options", type=str.split, default=[], help="further options, in one argument")
    parser.add_argument("--gguf", help="file of make_hybrid_gguf.py")
    parser.add_argument("--what", type=lambda text: text.split(","), default=[], help="cells, e.g. 'prefill 512,decode b8'")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    results = json.loads(options.out.read_text()) if options.out.exists() else []
    measure(options, results)
    table(results)


if __name__ == "__main__":
    main()
