"""Measures vLLM on a CPU. vLLM's Python runs this file as a script, which prints JSON."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

from peer import CONTEXT, DECODED, THREADS, Peer, Server, need, prompt


class Vllm(Peer):
    """Starting takes minutes, so processes are kept between runs. They are stopped while others are measured, because
    an idle one uses a core."""

    offline_process = None
    server = None

    def __init__(self, python, model, kind, preload=None):
        self.python, self.model, self.name = python, model, f"vLLM {kind}"
        # Without this binding, vLLM may reserve a core for the process that schedules.
        self.environment = {
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{THREADS - 1}",
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        if preload:
            # vLLM's documentation asks for tcmalloc and Intel's OpenMP.
            self.environment["LD_PRELOAD"] = preload

    def check(self):
        need(self.python, "Python with vLLM (--vllm)")
        need(self.model, "folder for vLLM (--model, --vllm-w8a8)")

    def version(self):
        return "vLLM " + self.run([self.python, "-c", "import vllm; print(vllm.__version__)"]).split()[-1]

    def offline(self, prefills, batches):
        if not self.offline_process:
            self.offline_process = subprocess.Popen(
                [self.python, __file__, self.model], env=os.environ | self.environment, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        os.killpg(self.offline_process.pid, signal.SIGCONT)
        self.offline_process.stdin.write(json.dumps([prefills, batches]) + "\n")
        self.offline_process.stdin.flush()
        for line in self.offline_process.stdout:
            # Other lines are vLLM's log.
            if line.startswith("{"):
                os.killpg(self.offline_process.pid, signal.SIGSTOP)
                return json.loads(line)
        ended, self.offline_process = self.offline_process, None
        raise RuntimeError(f"{self.name}: ended with {ended.wait()}")

    @contextlib.contextmanager
    def serving(self):
        if not self.server:
            self.server = Server(self)
        os.killpg(self.server.process.pid, signal.SIGCONT)
        try:
            yield self.server
        finally:
            os.killpg(self.server.process.pid, signal.SIGSTOP)

    def close(self):
        if self.offline_process:
            os.killpg(self.offline_process.pid, signal.SIGKILL)
        if self.server:
            os.killpg(self.server.process.pid, signal.SIGCONT)
            self.server.stop()

    def serve_command(self, port):
        # The `vllm` command looks for a package of that name, which the CPU build does not have.
        return [self.python, "-m", "vllm.entrypoints.openai.api_server", "--model", self.model, "--dtype", "bfloat16",
                "--port", port, "--max-model-len", 4096]  # fmt: skip


def main(model):
    from vllm import LLM, SamplingParams

    llm = LLM(model=model, dtype="bfloat16", max_model_len=4096, enable_prefix_caching=False)

    def seconds(lengths, max_tokens):
        prompts = [{"prompt_token_ids": prompt(length, seed)} for seed, length in enumerate(lengths)]
        options = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0, detokenize=False)
        began = time.monotonic()
        llm.generate(prompts, options, use_tqdm=False)
        return time.monotonic() - began

    warmed = set()
    for asked in sys.stdin:
        prefills, batches = json.loads(asked)
        speeds = {}
        seconds([CONTEXT], 2)
        for length in prefills:
            if length not in warmed:
                seconds([length], 1)
                warmed.add(length)
            speeds[f"prefill {length}"] = length / seconds([length], 1)
        for batch in batches:
            first = seconds([CONTEXT] * batch, 1)
            speeds[f"decode b{batch}"] = batch * DECODED / (seconds([CONTEXT] * batch, 1 + DECODED) - first)
        print(json.dumps(speeds), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
