#!/usr/bin/env python3
"""Tests and measures Corella on a machine with an NVIDIA GPU.

    cargo xtask gpu                                               # where Corella is built: packs target/gpu
    python3 bench/gpu.py --pack target/gpu --results FOLDER       # on the machine with the GPU

Each stage writes one file into the folder, whose last line says whether it passed. A stage that has passed is not run
again, and none starts that may take longer than the time that is left, so that the command can be repeated, with the
files of the call before in the folder, until all stages are done. Nothing is fetched. Needs Python 3.10; the shapes
of real models need numpy and tokenizers, and what they are compared with needs PyTorch and Transformers.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PASSED, FAILED = "passed", "FAILED"


class Run:
    """One stage's output file, and the commands that write to it."""

    def __init__(self, arguments, path, deadline):
        self.pack = arguments.pack.resolve()
        self.models = arguments.models.resolve()
        self.file = path.open("w")
        self.deadline = deadline

    def say(self, line=""):
        print(line, flush=True)
        print(line, file=self.file, flush=True)

    def command(self, *words, environment=()):
        """Runs a command with its output in the file. Returns whether it succeeded."""
        self.say("$ " + " ".join(str(word) for word in words))
        left = self.deadline - time.monotonic()
        try:
            result = subprocess.run(
                [str(word) for word in words],
                cwd=ROOT,
                env={**os.environ, **dict(environment)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=max(1, left),
            )
        except subprocess.TimeoutExpired as error:
            self.say((error.stdout or b"").decode(errors="replace") + "\nit ran out of time")
            return False
        except OSError as error:
            self.say(f"it did not start: {error}")
            return False
        self.say(result.stdout.rstrip())
        return result.returncode == 0

    def test(self, binary, *arguments):
        """Runs a binary of tests on the GPU, from where it finds its data."""
        root = Path((self.pack / "root").read_text())
        if not root.exists():
            root.parent.mkdir(parents=True, exist_ok=True)
            root.symlink_to(ROOT)
        environment = {"CORELLA_TEST_DEVICE": "gpu", "RUST_BACKTRACE": "1"}
        return self.command(self.pack / binary, *arguments, environment=environment)

    def model(self, shape):
        """The folder of a model of random weights, made unless it is there."""
        folder = self.models / shape
        if not (folder / "tokenizer.json").exists():
            self.command(sys.executable, "bench/make_model.py", shape, "--out", self.models)
        return folder

    def offline(self, model, prompts, prompt_len, max_tokens):
        """The report of requests that are submitted at once; None if there is none."""
        report = self.models / "report.json"
        report.unlink(missing_ok=True)
        self.command(
            self.pack / "corella", "bench", "offline", model, "--device", "cuda",
            "--num-prompts", prompts, "--input-lens", prompt_len, "--max-tokens", max_tokens,
            "--max-num-seqs", max(prompts, 8), "--no-enable-prefix-caching", "--output-json", report,
        )  # fmt: skip
        return json.loads(report.read_text()) if report.exists() else None


def machine(run):
    """The driver, and the limits of this machine in this hour: copies and bf16 products by PyTorch."""
    if not run.command("nvidia-smi"):
        return False
    run.command("nvidia-smi", "--query-gpu=name,driver_version,memory.total,clocks.sm,clocks.max.sm", "--format=csv")
    return run.command(sys.executable, "-c", LIMITS)


LIMITS = """
import torch
def timed(work, repeats=10):
    for _ in range(3): work()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record(); work(); end.record(); end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return sorted(times)[len(times) // 2]
a = torch.empty(1 << 32, dtype=torch.uint8, device="cuda"); b = torch.empty_like(a)
seconds = timed(lambda: b.copy_(a))
print(f"copy: {2 * a.numel() / seconds / 1e9:.0f} GB/s, read and written")
del a, b
for n in (4096, 8192):
    x, y = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    print(f"bf16 product of {n}: {2 * n**3 / timed(lambda: x @ y) / 1e12:.0f} TFLOP/s")
"""


def conformance(run):
    """Each kernel beside plain loops; chunked equals whole, batched equals alone, cached equals recomputed."""
    kernels = run.test("corella_cuda", "--skip", "device::emulated", "--test-threads", "8")
    return run.test("conformance", "--test-threads", "4") and kernels


def goldens(run):
    """Logits and tokens of Transformers."""
    return run.test("golden", "--test-threads", "4")


def decode(run):
    """Time of a decode step by batch and context. Prompts of a batch are computed one after the other; after that
    all decode together for most of the steps, so that the median is of such a step."""
    cases = [(1, 1024), (8, 1024), (64, 1024), (256, 1024), (1, 8000), (8, 8000)]
    # KV of 64 contexts of 8k would not fit beside the weights of 8 billion parameters in 80 GB.
    largest = {"qwen3-0.6b": (64, 8000), "llama-3-8b": (32, 8000)}
    return measure(run, 192, lambda shape: [*cases, largest[shape]], "itl")


def prefill(run):
    """Time to the first token of a prompt, one after the other."""
    return measure(run, 1, lambda _: [(1, 2048), (1, 8000)], "ttft")


def measure(run, max_tokens, cases_of, metric):
    rows = []
    for shape in ("qwen3-0.6b", "llama-3-8b"):
        model = run.model(shape)
        for prompts, prompt_len in cases_of(shape):
            report = run.offline(model, prompts, prompt_len, max_tokens)
            value = report and report.get(f"median_{metric}_ms")
            rows.append((shape, prompts, prompt_len, value))
    run.say(f"\nshape batch context median_{metric}_ms")
    for shape, prompts, prompt_len, value in rows:
        run.say(f"{shape} {prompts} {prompt_len} {'-' if value is None else f'{value:.3f}'}")
    return all(value is not None for *_, value in rows)


def start(run):
    """Start to the first token, with an empty cache of kernels and with a full one."""
    model = run.model("gpt2")
    command = [run.pack / "corella", "generate", model, "--prompt", "once", "--raw", "--max-tokens", "1", "--device", "cuda"]
    cache = run.models / "cache"
    times = []
    for kind in ("cold", "warm", "warm", "warm"):
        begin = time.monotonic()
        if not run.command(*command, environment={"XDG_CACHE_HOME": str(cache)}):
            return False
        times.append(time.monotonic() - begin)
        run.say(f"{kind}: {times[-1]:.2f} s")
    run.say(f"cold {times[0]:.2f} s, warm {statistics.median(times[1:]):.2f} s")
    return True


def scheduling(run):
    """GPT-2's shape with the workloads of packing and of longest prefixes."""
    model = run.model("gpt2")
    words = [sys.executable, "bench/scheduling.py", run.pack / "corella", "pack", "pack-8-decodes", "pack-chunked", "prefix"]
    return run.command(*words, "--model", model, "--device", "cuda")


def transformers(run):
    """Transformers beside it, in the same hour: a compiled decode with a static cache."""
    model = run.model("qwen3-0.6b")
    return run.command(sys.executable, "-c", COMPILED, model)


COMPILED = """
import sys, time, torch, transformers
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16, device_map="cuda")
model.generation_config.cache_implementation = "static"
for batch in (1, 8):
    ids = torch.randint(1000, 2000, (batch, 1024), device="cuda")
    def generate(count):
        torch.cuda.synchronize(); start = time.perf_counter()
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count,
                       do_sample=False)
        torch.cuda.synchronize(); return time.perf_counter() - start
    for _ in range(2): generate(65)
    short, long = (sorted(generate(count) for _ in range(3))[1] for count in (1, 65))
    print(f"static cache, batch {batch}, context 1024: {(long - short) / 64 * 1e3:.3f} ms a token", flush=True)
"""

# What each takes at most, in seconds.
STAGES = {
    machine: 60,
    conformance: 300,
    goldens: 180,
    decode: 480,
    prefill: 240,
    start: 60,
    scheduling: 240,
    transformers: 300,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pack", type=Path, required=True, help="what cargo xtask gpu made")
    parser.add_argument("--results", type=Path, required=True, help="folder for a file of each stage")
    parser.add_argument("--models", type=Path, default=Path("/tmp/corella-models"), help="folder for models")
    parser.add_argument("--seconds", type=float, default=570, help="time for all stages of this call")
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=f"of {', '.join(s.__name__ for s in STAGES)}")
    arguments = parser.parse_args()
    unknown = set(arguments.stages) - {stage.__name__ for stage in STAGES}
    if unknown:
        parser.error(f"there is no stage {', '.join(sorted(unknown))}")
    deadline = time.monotonic() + arguments.seconds
    arguments.results.mkdir(parents=True, exist_ok=True)
    arguments.models.mkdir(parents=True, exist_ok=True)
    outcomes = {}
    for stage, seconds in STAGES.items():
        name = stage.__name__
        if arguments.stages and name not in arguments.stages:
            continue
        path = arguments.results / f"{name}.txt"
        if path.exists() and path.read_text().rstrip().endswith(f"\n{name} {PASSED}"):
            outcomes[name] = "passed before"
            continue
        if time.monotonic() + seconds > deadline:
            outcomes[name] = "not run: too little time is left"
            continue
        print(f"==> {name}", flush=True)
        run = Run(arguments, path, deadline)
        outcome = PASSED if stage(run) else FAILED
        run.say(f"\n{name} {outcome}")
        run.file.close()
        outcomes[name] = outcome
    for name, outcome in outcomes.items():
        print(f"{name:<14}{outcome}")
    if all(outcome.startswith("passed") for outcome in outcomes.values()):
        print("all stages are done")
        return 0
    return 1


if __name__ == "__main__":
    sys.exit(main())
