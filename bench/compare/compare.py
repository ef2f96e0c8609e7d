"""Compares Corella with other engines, by turns, with the same model, machine and client.

    python bench/compare/compare.py --corella target/release/corella --model bench/models/qwen3-0.6b \\
        --llama …/llama.cpp/build/bin --gguf … --vllm …/bin/python --openvino …/bin/python --openvino-models … \\
        --transformers .venv/bin/python --out compare.json > compare.md

README.md in this folder describes how to get the others; a missing engine is named and skipped. Rounds accumulate in
the file of --out, so that an interrupted comparison can continue.
"""

import argparse
import contextlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from corella_peer import Corella
from llama_peer import Llama
from openvino_peer import OpenVino
from peer import BATCHES, PREFILLS, Missing, prompt
from transformers_peer import Transformers
from vllm_peer import Vllm

TITLES = {
    "offline": "Offline, tokens/s",
    "busy": "Offline with one of the cores busy, tokens/s",
    "serve": "Servers",
}
HIGHER_IS_BETTER = ("prefill", "decode", "output")
LLAMA_KINDS = ("bf16", "Q8_0", "Q4_0")
PREFIX, NEW = 900, 16


def pairs(options):
    """Yields each setting of Corella with a comparable setting of another engine."""
    for dtype in options.dtypes:
        ours = Corella(options.corella, options.model, f"Corella {dtype}", ["--dtype", dtype])
        # bf16 is compared with every format, to show the gain of fewer bits.
        bits = {"int8": ["Q8_0", "int8", "w8a8"], "int4": ["Q4_0", "int4"]}.get(
            dtype, ["bf16", "Q8_0", "Q4_0", "int8", "int4"]
        )
        for kind in LLAMA_KINDS:
            if kind in bits:
                yield ours, Llama(options.llama, options.gguf, kind)
        for kind in ("bf16", "int8", "int4"):
            if kind in bits:
                yield ours, OpenVino(options.openvino, options.openvino_models, kind)
        if "bf16" in bits:
            yield ours, Vllm(options.vllm, options.model, "bf16", options.vllm_preload)
            yield ours, Transformers(options.transformers, options.model)
        if "w8a8" in bits:
            yield ours, Vllm(options.vllm, options.vllm_w8a8, "w8a8", options.vllm_preload)
        for isa in ("avx512", "avx2"):
            if libraries := getattr(options, f"llama_{isa}"):
                kind = {"bf16": "bf16", "int8": "Q8_0", "int4": "Q4_0"}[dtype]
                restricted = Corella(
                    options.corella, options.model, f"Corella {dtype} {isa}", ["--dtype", dtype, "--isa", isa]
                )
                yield restricted, Llama(options.llama, options.gguf, kind, f"llama.cpp {kind} {isa}", libraries)


# ---- suites: each returns {name of the measurement: number} for one engine


def offline(peer, part, _client, _options, _round):
    return peer.offline(*part)


def busy(peer, _part, _client, _options, _round):
    """Measures the decode of one request while another process uses one of the cores."""
    code = f"import os\nos.sched_setaffinity(0, {{{max(os.sched_getaffinity(0))}}})\nwhile True: pass"
    other = subprocess.Popen([sys.executable, "-c", code])
    try:
        return peer.offline((), (1,))
    finally:
        other.kill()
        other.wait()


def serve(peer, _part, client, options, round):
    with peer.serving() as server:
        load = client(server, "--prompt-tokens", 256, "--unique-prompts", "--num-prompts", options.requests,
                      "--max-concurrency", 8, "--max-tokens", 64, "--ignore-eos", "--seed", round)  # fmt: skip
        with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
            prefix = prompt(PREFIX, f"prefix {round}")
            for more in range(1, NEW + 1):
                print(json.dumps({"prompt": prefix + prompt(more, f"{round} {more}")}), file=file, flush=True)
            shared = client(server, "--prompts", file.name, "--num-prompts", NEW, "--max-concurrency", 1,
                            "--max-tokens", 1)  # fmt: skip
        return {
            "output, tokens/s": load["output_throughput"],
            "TTFT p99, ms": load["p99_ttft_ms"],
            "TPOT p50, ms": load["p50_tpot_ms"],
            "TTFT p50 after a shared prefix, ms": shared["p50_ttft_ms"],
            "start to first token, s": server.started_s,
            "peak memory, GB": server.peak_rss_gb(),
        }


SUITES = {"offline": offline, "busy": busy, "serve": serve}


def make_client(binary):
    def client(server, *load):
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "report.json"
            command = [binary, "bench", "serve", "--base-url", server.url, "--model", server.model, "--output-json", out, *load]
            subprocess.run([str(part) for part in command], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
            report = json.loads(out.read_text())
        if report["failed"]:
            raise RuntimeError(f"{report['failed']} of {report['completed'] + report['failed']} requests failed")
        return report

    return client


# ---- the comparison


class Load:
    """Measures the share of the cores in use by other processes."""

    def __init__(self):
        self.began, self.before = time.monotonic(), self.busy_s()

    def busy_s(self):
        """Returns the core seconds that were neither idle nor used by this comparison."""
        user, nice, system, _idle, _wait, irq, soft, steal = map(int, open("/proc/stat").readline().split()[1:9])
        ours = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        total = (user + nice + system + irq + soft + steal - descendants_ticks()) / os.sysconf("SC_CLK_TCK")
        return total - sum(it.ru_utime + it.ru_stime for it in ours)

    def of_others(self):
        return (self.busy_s() - self.before) / (time.monotonic() - self.began) / os.cpu_count()


def descendants_ticks():
    """Returns the processor time of living descendants; RUSAGE_CHILDREN has the ended ones' time."""
    parents, ticks = {}, {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            pid, rest = int(stat.parent.name), stat.read_text().rpartition(")")[2].split()
            parents[pid], ticks[pid] = int(rest[1]), sum(map(int, rest[11:15]))

    def is_ours(pid):
        while pid in parents:
            pid = parents[pid]
            if pid == os.getpid():
                return True
        return False

    return sum(ticks[pid] for pid in parents if is_ours(pid))


def measure(options, results):
    client = make_client(options.corella)
    chosen = [(ours, peer) for ours, peer in pairs(options) if not options.peers or peer.name in options.peers]
    for ours, peer in list(chosen):
        try:
            ours.check()
            peer.check()
            for it in (ours, peer):
                results["versions"][it.name] = it.version()
            results["passed over"].pop(peer.name, None)
        except Missing as missing:
            results["passed over"][peer.name] = str(missing)
            print(f"{peer.name} is skipped: {missing}", file=sys.stderr)
            chosen.remove((ours, peer))
    try:
        for at in range(options.rounds):
            for suite in options.suites:
                for ours, peer in chosen:
                    for part in parts(suite, options):
                        for run in pair(suite, part, ours, peer, client, at, options, results):
                            results["runs"].append(run)
                            options.out.write_text(json.dumps(results, indent=1) + "\n")
                            print(suite, peer.name, json.dumps(run["values"]), f"others {run['others']:.3f}", file=sys.stderr)
    finally:
        for _, peer in chosen:
            peer.close()


def parts(suite, options):
    """Splits a suite into parts short enough that the machine probably stays quiet during each."""
    if suite != "offline":
        return [(PREFILLS, BATCHES)]
    prefills = [length for length in PREFILLS if f"prefill {length}" in options.what]
    batches = [batch for batch in BATCHES if f"decode b{batch}" in options.what]
    return [((length,), ()) for length in prefills] + [((), (batch,)) for batch in batches]


def pair(suite, part, ours, peer, client, at, options, results):
    """Yields pairs of runs until one is quiet enough; none if the peer cannot run the suite."""
    try:
        if suite == "serve":
            peer.serve_command(0)
        for _ in range(options.tries):
            load = Load()
            values = [SUITES[suite](it, part, client, options, at) for it in (ours, peer)]
            others = load.of_others()
            yield {"suite": suite, "names": [ours.name, peer.name], "values": values, "others": others}
            if others <= options.max_others:
                break
    except Missing as missing:
        results["passed over"][f"{peer.name}, {suite}"] = str(missing)
    except (RuntimeError, subprocess.CalledProcessError) as error:
        # The other engines can still be measured.
        results["passed over"][f"{peer.name}, {suite}"] = str(error).strip().splitlines()[-1]
        print(f"{suite}, {peer.name}: {error}", file=sys.stderr)


def spread(values):
    def short(value):
        return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"

    middle = short(statistics.median(values))
    return middle if len(values) == 1 else f"{middle} ({short(min(values))}–{short(max(values))})"


def table(results, max_others):
    for suite in SUITES:
        rows = {}
        for run in results["runs"]:
            if run["suite"] == suite and run["others"] <= max_others:
                ours, theirs = run["values"]
                for what in ours.keys() & theirs.keys():
                    rows.setdefault((what, *run["names"]), []).append((ours[what], theirs[what]))
        if not rows:
            continue
        order = {name: at for at, name in enumerate(dict.fromkeys(run["names"][1] for run in results["runs"]))}
        kinds = list(dict.fromkeys(what for run in results["runs"] for what in run["values"][0]))
        print(f"\n## {TITLES[suite]}\n")
        print("| | pair | times | Corella | the other | **Corella is ahead by** |\n|---|---|---|---|---|---|")
        for (what, our_name, name), values in sorted(rows.items(), key=lambda row: (kinds.index(row[0][0]), order[row[0][2]])):
            ours, theirs = zip(*values)
            ratios = [a / b if what.startswith(HIGHER_IS_BETTER) else b / a for a, b in values]
            print(f"| {what} | {our_name} / {name} | {len(values)} | {spread(ours)} | {spread(theirs)} | **×** {spread(ratios)} |")
    left_out = sum(run["others"] > max_others for run in results["runs"])
    if left_out:
        print(f"\n{left_out} of {len(results['runs'])} pairs of runs are left out: other processes used more than"
              f" {max_others:.0%} of the cores.")  # fmt: skip
    print("\nMeasured: " + "; ".join(f"{name}: {version}" for name, version in results["versions"].items()) + ".")
    for name, why in results["passed over"].items():
        print(f"\nNot measured: {name}: {why}.")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suites", nargs="*", choices=[[], *SUITES], metavar="SUITE", help=f"suites to run, from {', '.join(SUITES)} [all]")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("compare.json"), help="file that the numbers of all rounds are added to")
    parser.add_argument("--peers", type=lambda text: text.split(","), help="compare only with these, e.g. 'llama.cpp bf16,vLLM bf16'")
    offline_all = [f"prefill {length}" for length in PREFILLS] + [f"decode b{batch}" for batch in BATCHES]
    parser.add_argument("--what", type=lambda text: text.split(","), default=offline_all,
                        help=f"measurements of the offline suite, from {', '.join(offline_all)} [all]")  # fmt: skip
    parser.add_argument("--dtypes", type=lambda text: text.split(","), default=["bf16"], help="types of Corella's weights [bf16]")
    parser.add_argument("--max-others", type=float, default=0.1, help="a pair does not count if other processes use more than this share of the cores")
    parser.add_argument("--requests", type=int, default=32, help="number of requests to a server, 8 at a time [32]")
    parser.add_argument("--tries", type=int, default=1, help="most tries of a pair while other processes use more than that [1]")
    for name, what in (
        ("corella", "binary"),
        ("model", "folder of bench/make_model.py"),
        ("llama", "folder of llama.cpp's binaries"),
        ("llama-avx512", "folder of a libggml-cpu.so without AMX"),
        ("llama-avx2", "folder of a libggml-cpu.so without AVX-512"),
        ("gguf", "folder of make_gguf.py"),
        ("vllm", "Python that has vLLM"),
        ("vllm-preload", "LD_PRELOAD for vLLM"),
        ("vllm-w8a8", "folder of `corella quantize --format int8`"),
        ("openvino", "Python that has OpenVINO GenAI"),
        ("openvino-models", "folder of exported models fp16, int8, int4"),
        ("transformers", "Python that has Transformers"),
    ):
        variable = "COMPARE_" + name.upper().replace("-", "_")
        parser.add_argument("--" + name, metavar="PATH", default=os.environ.get(variable), help=f"{what} [env: {variable}]")
    options = parser.parse_args()
    options.suites = options.suites or list(SUITES)
    results = {"versions": {}, "passed over": {}, "runs": []}
    if options.out.exists():
        results = json.loads(options.out.read_text())
    measure(options, results)
    table(results, options.max_others)


if __name__ == "__main__":
    main()
