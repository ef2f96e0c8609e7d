#!/usr/bin/env python3
"""Tests and measures Corella on a machine with an NVIDIA GPU.

    cargo xtask gpu                                                       # where Corella is built
    python3 bench/gpu.py --pack target/gpu/pack.tar.xz --results FOLDER   # on the machine with the GPU

The first makes the pack, which has all binaries. Each stage writes one file into the folder, whose last line says
whether it passed. Stages that end in -wgmma run with CORELLA_CUDA_WGMMA=1. A passed stage is not run again, and a stage
that may exceed the remaining time does not start, so that the command can be repeated, with the files of the previous
call in the folder (or in another one, by --before), until all stages are done. Nothing is downloaded. Needs Python
3.10; comparisons of speed, the driver's packages apart, need PyTorch, Transformers, numpy and tokenizers.
"""

import argparse
import contextlib
import csv
import hashlib
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PASSED, FAILED = "passed", "FAILED"


class Run:
    """One stage's output file, and the commands that write to it."""

    def __init__(self, arguments, path, deadline, environment):
        self.pack = unpacked(arguments.pack.resolve())
        self.models = arguments.models.resolve()
        self.results = path.parent
        self.file = path.open("w")
        self.deadline = deadline
        self.environment = environment

    def say(self, line=""):
        print(line, flush=True)
        print(line, file=self.file, flush=True)

    def command(self, *words, environment=(), stderr=subprocess.STDOUT):
        """Runs a command with its output in the file and in `output`. Returns whether it succeeded."""
        self.say("$ " + " ".join(str(word) for word in words))
        left = self.deadline - time.monotonic()
        try:
            result = subprocess.run(
                [str(word) for word in words],
                cwd=ROOT,
                # Here the executor looks for the CUDA libraries of PyTorch.
                env={"VIRTUAL_ENV": sys.prefix, **os.environ, **self.environment, **dict(environment)},
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                errors="replace",
                timeout=max(1, left),
            )
        except subprocess.TimeoutExpired as error:
            output = error.stdout or ""
            self.output = output if isinstance(output, str) else output.decode(errors="replace")
            self.say(self.output + "\nit ran out of time")
            return False
        except OSError as error:
            self.output = ""
            self.say(f"it did not start: {error}")
            return False
        self.output = result.stdout.rstrip()
        self.say(self.output)
        if result.stderr:
            self.say(result.stderr.rstrip())
        return result.returncode == 0

    def test(self, binary, *arguments):
        """Runs a test binary on the GPU, in the folder of its data."""
        root = Path((self.pack / "root").read_text())
        if not root.exists():
            root.parent.mkdir(parents=True, exist_ok=True)
            root.symlink_to(ROOT)
        environment = {"CORELLA_TEST_DEVICE": "gpu", "RUST_BACKTRACE": "1"}
        if self.command(self.pack / binary, *arguments, environment=environment):
            return True
        # A faulty kernel breaks the GPU's context, and all tests beside or after it fail. Run alone, each test shows
        # its own fault.
        checker = [shutil.which("compute-sanitizer")] if shutil.which("compute-sanitizer") else []
        for name in re.findall(r"^test (\S+) \.\.\. FAILED$", self.output, re.MULTILINE)[:MAX_REPEATED_TESTS]:
            words = (self.pack / binary, "--exact", name)
            if time.monotonic() < self.deadline - 5 and not self.command(*words, environment=environment):
                self.command(*checker, *words, environment=environment)
        return False

    def model(self, shape):
        """The folder of a model of random weights, made unless it is there."""
        folder = self.models / shape
        if not (folder / "tokenizer.json").exists():
            self.command(sys.executable, "bench/make_model.py", shape, "--out", self.models)
        return folder


def unpacked(pack):
    """The folder of the binaries."""
    folder = Path(tempfile.gettempdir()) / f"corella-pack-{hashlib.sha256(pack.read_bytes()).hexdigest()[:16]}"
    if not folder.exists():
        # Concurrent stages find all binaries or none.
        with tempfile.TemporaryDirectory(dir=folder.parent) as unfinished, tarfile.open(pack) as binaries:
            binaries.extractall(f"{unfinished}/pack")
            with contextlib.suppress(OSError):
                os.rename(f"{unfinished}/pack", folder)
    return folder


def machine(run):
    """Prints the driver, and the machine's current limits: copies and bf16 products by PyTorch."""
    if not run.command("nvidia-smi"):
        return False
    bits = Path(tempfile.gettempdir()) / "wgmma_bits"
    nvcc = ["nvcc", "-gencode=arch=compute_90a,code=sm_90a", "-o", bits, "bench/cuda/wgmma_bits.cu"]
    if run.command(*nvcc):
        run.command(bits)
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


def hopper(run):
    """Hopper's matrix kernel, variants of it and the other kernels: bits, then times."""
    words = ["bash", "bench/cuda/hopper/run.sh", run.pack / "hopper", run.results / "hopper"]
    return run.command(*words)


# A fault of a device may fail every test.
MAX_REPEATED_TESTS = 6


def kernels(run):
    """Each kernel beside plain loops."""
    return run.test("corella_cuda", "--skip", "device::emulated", "--test-threads", "8")


def conformance(run):
    """Chunked equals whole, batched equals alone, cached equals recomputed."""
    return run.test("suite", "conformance::", "--test-threads", "4")


def goldens(run):
    """Logits and tokens of Transformers."""
    return run.test("suite", "golden::", "--test-threads", "4")


def greedy(run):
    """Greedy answers in f32 beside those of the CPU executor: one line, if they are equal."""
    good = True
    for prompt in ("Once there was", "The small engine", "Counting: one, two,", "a"):
        words = [run.pack / "corella", "generate", "models/nano", "--raw", "--prompt", prompt, "--dtype", "f32"]
        words += ["--temperature", "0", "--max-tokens", "96", "--ignore-eos", "--no-limits"]
        answers = []
        for device in ("cpu", "cuda"):
            good &= run.command(*words, "--device", device, stderr=subprocess.PIPE)
            answers.append(run.output)
        run.say(f"{prompt!r}: {'equal' if answers[0] == answers[1] else 'DIFFERENT'}")
        good &= answers[0] == answers[1]
    return good


def serving(run):
    """Serves clients from a server and from a pair of nodes."""
    return run.command(sys.executable, "bench/gpu_serving.py", run.pack / "corella", ROOT / "models/nano")


def profile(run):
    """Profiles each kernel's time, by ncu, in a decode step of few and of many rows, and in a prompt."""
    if not shutil.which("ncu"):
        run.say("there is no ncu")
        return False
    good = True
    for shape, work in (("qwen3-0.6b", "decode:1:1024"), ("llama-3-8b", "decode:64:1024"), ("llama-3-8b", "prefill:2048")):
        metrics = ",".join(METRICS)
        words = ["ncu", "--clock-control", "none", "--profile-from-start", "off", "--launch-count", 260]
        words += ["--csv", "--page", "raw", "--metrics", metrics, run.pack / "speed", "--profile", work, shape]
        show, run.say = run.say, lambda *_: None
        good &= run.command(*words)
        run.say = show
        run.say(f"\n{shape}, {work}")
        for line in by_kernel(run.output):
            run.say(line)
    return good


METRICS = (
    "gpu__time_duration.sum",
    "dram__bytes.sum",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active",
    "launch__registers_per_thread",
    "sm__warps_active.avg.pct_of_peak_sustained_active",
)


def by_kernel(output):
    """Returns the lines of a table: kernels grouped by name and grid, the slowest first."""
    lines = output.splitlines()
    header = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if header is None:
        return lines[-40:]
    rows = list(csv.DictReader(lines[header:]))
    units, kernels = rows[0], {}
    for row in rows[1:]:
        kernels.setdefault((row["Kernel Name"], row["Grid Size"], row["Block Size"]), []).append(row)

    def total(rows, metric):
        return sum(float(row[metric].replace(",", "") or 0) for row in rows)

    table = [" ".join(f"{metric} [{units[metric]}]" for metric in METRICS)]
    for key, rows in sorted(kernels.items(), key=lambda item: -total(item[1], METRICS[0])):
        means = (f"{total(rows, metric) / len(rows):.3f}" for metric in METRICS)
        table.append(f"{len(rows)} x {' '.join(key)}: {' '.join(means)}")
    return table


def speed(run):
    """Decode steps and prompts of Qwen3-0.6B and Llama-3-8B with random weights, beside copies and products."""
    passed = run.command(run.pack / "speed")
    before = run.results / "speed.txt"
    if run.environment and before.exists():
        run.say("\nwithout and with wgmma, in ms")
        was, now = (milliseconds(text) for text in (before.read_text(), run.output))
        for work in [work for work in now if work in was]:
            run.say(f"{', '.join(work)}: {was[work]} {now[work]}")
    return passed


def milliseconds(output):
    """Returns the milliseconds that `speed` prints for each piece of work, named by model, products, kind, batch and
    tokens."""
    times, model = {}, ""
    for line in output.splitlines():
        if match := re.match(r"(\S+, .+), ready in ", line):
            model = match[1]
        elif match := re.match(r"(prefill|decode) (\d+) (\d+) ([\d.]+) ", line):
            times[model, match[1], match[2], match[3]] = match[4]
    return times


def start(run):
    """Measures the time from start to the first token, with an empty and with a full cache of kernels."""
    cache = run.models / "cache"
    lines = []
    for shape in ("gpt2", "qwen3-0.6b"):
        shutil.rmtree(cache, ignore_errors=True)
        command = [run.pack / "corella", "generate", run.model(shape), "--prompt", "once", "--raw", "--max-tokens", "1"]
        times = []
        for kind in ("cold", "warm", "warm", "warm"):
            begin = time.monotonic()
            if not run.command(*command, "--device", "cuda", environment={"XDG_CACHE_HOME": str(cache)}):
                return False
            times.append(time.monotonic() - begin)
            run.say(f"{kind}: {times[-1]:.2f} s")
        lines.append(f"{shape}: cold {times[0]:.2f} s, warm {statistics.median(times[1:]):.2f} s")
    for line in lines:
        run.say(line)
    return True


def scheduling(run):
    """GPT-2's shape with the workloads of packing and of longest prefixes."""
    model = run.model("gpt2")
    words = [sys.executable, "bench/scheduling.py", run.pack / "corella", "pack", "pack-8-decodes", "pack-chunked", "prefix"]
    return run.command(*words, "--model", model, "--device", "cuda")


def transformers(run):
    """Measures Transformers beside it, in the same hour: continuous batching, and a compiled decode with a static
    cache."""
    model = run.model("qwen3-0.6b")
    report = run.models / "report.json"
    report.unlink(missing_ok=True)
    passed = run.command(
        run.pack / "corella", "bench", "offline", model, "--device", "cuda", "--output-json", report,
        "--num-prompts", NUM_PROMPTS, "--input-lens", PROMPT_LEN, "--max-tokens", MAX_TOKENS,
        "--max-num-seqs", NUM_PROMPTS, "--max-num-batched-tokens", 8192, "--no-enable-prefix-caching",
    )  # fmt: skip
    if passed:
        result = json.loads(report.read_text())
        run.say(f"Corella: {result['output_throughput']:.0f} tokens/s, ITL {result['median_itl_ms']:.3f} ms")
    workload = (NUM_PROMPTS, PROMPT_LEN, MAX_TOKENS)
    offline = {"HF_HUB_OFFLINE": "1"}
    # Each one runs alone, so that a failure of one does not stop the other.
    batched = run.command(sys.executable, "-c", BATCHED, model, *workload, environment=offline)
    compiled = run.command(sys.executable, "-c", COMPILED, model, environment=offline)
    return passed and batched and compiled


NUM_PROMPTS, PROMPT_LEN, MAX_TOKENS = 128, 512, 128

BATCHED = """
import sys, time, torch, transformers
num_prompts, prompt_len, max_tokens = map(int, sys.argv[2:])
model = transformers.AutoModelForCausalLM.from_pretrained(
    sys.argv[1], dtype=torch.bfloat16, device_map="cuda", attn_implementation="paged|sdpa")
ids = torch.randint(1000, 2000, (num_prompts, prompt_len)).tolist()
config = transformers.GenerationConfig(max_new_tokens=max_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
rates = []
for attempt in range(4):
    start = time.perf_counter()
    # What it prepares for the first call stays for the others.
    outputs = model.generate_batch(inputs=ids, generation_config=config, persistent_manager=True)
    seconds = time.perf_counter() - start
    num_tokens = sum(len(output.generated_tokens) for output in outputs.values())
    rates.append(num_tokens / seconds)
    print(f"continuous batching: {num_tokens} tokens in {seconds:.2f} s", flush=True)
    assert num_tokens == num_prompts * max_tokens, num_tokens
print(f"continuous batching: {sorted(rates[1:])[1]:.0f} tokens/s")
"""

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

# Requests Hopper's matrix kernel, which is off by default.
WGMMA = {"CORELLA_CUDA_WGMMA": "1"}

# By name: the function, the limit of its seconds, and its environment.
STAGES = {
    "machine": (machine, 60, {}),
    "hopper": (hopper, 130, {}),
    "kernels": (kernels, 120, {}),
    "kernels-wgmma": (kernels, 120, WGMMA),
    "speed": (speed, 90, {}),
    "speed-wgmma": (speed, 90, WGMMA),
    "conformance-wgmma": (conformance, 120, WGMMA),
    "goldens-wgmma": (goldens, 120, WGMMA),
    "greedy-wgmma": (greedy, 60, WGMMA),
    "conformance": (conformance, 120, {}),
    "goldens": (goldens, 120, {}),
    "greedy": (greedy, 60, {}),
    "serving": (serving, 60, {}),
    "profile": (profile, 120, {}),
    "start": (start, 60, {}),
    "scheduling": (scheduling, 100, {}),
    "transformers": (transformers, 240, {}),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pack", type=Path, required=True, help="what cargo xtask gpu made")
    parser.add_argument("--results", type=Path, required=True, help="folder for a file of each stage")
    parser.add_argument("--before", type=Path, help="folder with the files of the call before")
    parser.add_argument("--models", type=Path, default=Path("/tmp/corella-models"), help="folder for models")
    parser.add_argument("--seconds", type=float, default=570, help="time for all stages of this call")
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=f"of {', '.join(STAGES)}")
    arguments = parser.parse_args()
    unknown = set(arguments.stages) - set(STAGES)
    if unknown:
        parser.error(f"there is no stage {', '.join(sorted(unknown))}")
    deadline = time.monotonic() + arguments.seconds
    arguments.results.mkdir(parents=True, exist_ok=True)
    arguments.models.mkdir(parents=True, exist_ok=True)
    if arguments.before:
        for file in arguments.before.glob("*.txt"):
            shutil.copy(file, arguments.results)
    outcomes = {}
    for name, (stage, seconds, environment) in STAGES.items():
        if arguments.stages and name not in arguments.stages:
            continue
        path = arguments.results / f"{name}.txt"
        if path.exists() and path.read_text().rstrip().endswith(f"\n{name} {PASSED}"):
            outcomes[name] = "passed before"
            continue
        if time.monotonic() + seconds > deadline + 1:
            outcomes[name] = "not run: too little time is left"
            continue
        print(f"==> {name}", flush=True)
        run = Run(arguments, path, min(deadline, time.monotonic() + seconds), environment)
        begin = time.monotonic()
        outcome = PASSED if stage(run) else FAILED
        run.say(f"\n{name}: {time.monotonic() - begin:.0f} s")
        run.say(f"\n{name} {outcome}")
        run.file.close()
        outcomes[name] = outcome
    for name, outcome in outcomes.items():
        print(f"{name:<18}{outcome}")
    if all(outcome.startswith("passed") for outcome in outcomes.values()):
        print("all stages are done")
        return 0
    return 1


if __name__ == "__main__":
    sys.exit(main())
