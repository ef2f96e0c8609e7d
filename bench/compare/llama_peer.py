"""Measures llama.cpp by llama-batched-bench and llama-server, from the user's own build."""

import json
import subprocess
from pathlib import Path

from peer import CONTEXT, DECODED, THREADS, Peer, need


class Llama(Peer):
    def __init__(self, binaries, gguf, kind, name=None, libraries=None):
        self.given, self.binaries, self.kind = (binaries, gguf), Path(binaries or ""), kind
        self.name = name or f"llama.cpp {kind}"
        self.gguf = Path(gguf or "") / f"{kind.lower()}.gguf"
        if libraries:
            # The folder has a libggml-cpu.so for other instructions than the build's.
            self.environment = {"LD_LIBRARY_PATH": str(libraries)}

    def check(self):
        need(self.given[0], "folder of llama.cpp's binaries (--llama)")
        need(self.given[1], "folder of GGUF files (--gguf)")
        for name in ("llama-batched-bench", "llama-server"):
            need(self.binaries / name, f"{name} (--llama)")
        need(self.gguf, f"{self.kind} file (--gguf)")

    def version(self):
        done = subprocess.run([self.binaries / "llama-server", "--version"], capture_output=True, text=True)
        return " ".join(next(line for line in (done.stderr + done.stdout).splitlines() if "version" in line).split())

    def offline(self, prefills, batches):
        speeds = {}
        if prefills:
            for row in self.bench(max(prefills) + 1, prefills, 1, [1]):
                speeds[f"prefill {row['pp']}"] = row["speed_pp"]
        if batches:
            # The prompt is computed once and its KV copied; decoding then reads as much as with many prompts.
            for row in self.bench(max(batches) * (CONTEXT + DECODED), [CONTEXT], DECODED, batches, "-pps"):
                speeds[f"decode b{row['pl']}"] = row["speed_tg"]
        return speeds

    def bench(self, context, prompts, decoded, batches, *more):
        """Runs llama-batched-bench; llama-bench gives the same speeds, but has no batches."""
        rows = self.run([self.binaries / "llama-batched-bench", "-m", self.gguf, "-t", THREADS, "-c", context, "-ntg", decoded,
                         "-npp", ",".join(map(str, prompts)), "-npl", ",".join(map(str, batches)),
                         "--output-format", "jsonl", *more])  # fmt: skip
        return [json.loads(line) for line in rows.splitlines() if line.startswith("{")]

    def serve_command(self, port):
        return [self.binaries / "llama-server", "-m", self.gguf, "-t", THREADS, "--port", port, "-np", 8, "-c", 16384]
