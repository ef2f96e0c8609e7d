"""Measures what `--kv-disk` saves: times to the first token of prompts that memory has lost.

    python bench/kv_disk.py target/release/corella MODEL [--prompt-tokens 2048] [--rounds 5] [--folder FOLDER]

MODEL is a folder of `bench/make_model.py`, and FOLDER a folder on the disk. Sixteen prompts take four times the KV cache
and are asked in turn, so that none is in memory when it comes again. Their last 64 tokens differ each time:

* computed: without `--kv-disk`;
* disk: with it;
* restart: with it, after SIGKILL. The file is dropped from the page cache before each request.

The closed form beside them: the bytes read for a prompt at the speed of the disk, which one thread measures in the same
run, and the prompt's other tokens at the measured speed of computing.
"""

import argparse
import os
import random
import signal
import statistics
import tempfile
import time
from pathlib import Path

from node_process import NodeProcess, time_first_token

NUM_PROMPTS = 16
NUM_NEW = 64


def drop(file):
    """Drops a file from the page cache."""
    descriptor = os.open(file, os.O_RDONLY)
    os.fdatasync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def measure_disk(file, num_bytes):
    """Returns the bytes that one thread reads in a second from the disk."""
    drop(file)
    begun, num_read = time.perf_counter(), 0
    with open(file, "rb", buffering=0) as source:
        while num_read < num_bytes and (piece := source.read(1 << 20)):
            num_read += len(piece)
    return num_read / (time.perf_counter() - begun)


class Bench:
    def __init__(self, options, folder):
        self.options = options
        self.folder = Path(folder)
        self.disk = ["--kv-disk", f"{self.folder / 'kv'},{options.size}"]
        draw = random.Random(options.prompt_tokens)
        length = options.prompt_tokens - NUM_NEW
        self.prompts = [[draw.randrange(256, 2000) for _ in range(length)] for _ in range(NUM_PROMPTS)]
        self.memory = "256M"
        node = self.start()
        tokens = node.num_pages() * 16
        node.stop()
        self.memory = f"{256 * NUM_PROMPTS * options.prompt_tokens // 4 // tokens + 1}M"

    def start(self, *more):
        limits = ["--max-model-len", self.options.prompt_tokens + 64, "--kv-cache-memory", self.memory]
        node = NodeProcess(self.options.binary, [self.options.model, *limits, *more], self.folder / "log")
        node.wait_ready()
        return node

    def ask_all(self, node, turn, before=lambda: None):
        """Asks each prompt. Returns seconds to the first token, with cached tokens and bytes read from the disk."""
        rows = []
        for prompt in self.prompts:
            before()
            num_bytes = node.metric("corella_kv_disk_read_bytes_total")
            seconds, _, cached = time_first_token(node.connect(), prompt + [300 + turn] * NUM_NEW, 1, temperature=0)
            rows.append((seconds, cached, node.metric("corella_kv_disk_read_bytes_total") - num_bytes))
        return rows

    def wait_stored(self, node):
        """Waits until the disk's thread has nothing left to write."""
        before = -1
        while (now := node.metric("corella_kv_disk_written_bytes_total")) != before:
            before = now
            time.sleep(1)

    def run(self):
        """Returns the rows of each way, and the disk's bytes per second."""
        rows = {"computed": [], "disk": [], "restart": []}
        node = self.start()
        for turn in range(self.options.rounds):
            rows["computed"] += self.ask_all(node, turn)
        node.stop()
        node = self.start(*self.disk)
        self.ask_all(node, 100)
        self.wait_stored(node)
        for turn in range(self.options.rounds):
            rows["disk"] += self.ask_all(node, turn)
        self.wait_stored(node)
        [file] = [file for file in (self.folder / "kv").iterdir() if file.stat().st_size > 1 << 20]
        for turn in range(self.options.rounds):
            os.kill(node.pid, signal.SIGKILL)
            node.stop()
            node = self.start(*self.disk)
            while node.metric("corella_kv_disk_blocks") == 0:
                time.sleep(0.05)
            rows["restart"] += self.ask_all(node, 200 + turn, lambda: drop(file))
        node.stop()
        return rows, measure_disk(file, 1 << 30)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("binary", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("--prompt-tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", help="a folder on the disk")
    parser.add_argument("--size", default="4G", help="of the file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kv-disk-", dir=options.folder) as folder:
        bench = Bench(options, folder)
        rows, speed = bench.run()
    computed = statistics.median(seconds for seconds, _, _ in rows["computed"])
    print(f"{options.model.name}, {options.prompt_tokens} tokens, KV cache {bench.memory}, disk {speed / 1e9:.2f} GB/s\n")
    print("| | cached | s to the first token (lowest to highest) | of computed | closed form, s | of the closed form |")
    print("|---|---|---|---|---|---|")
    for name, found in rows.items():
        seconds, cached, num_bytes = zip(*found)
        median, cached = statistics.median(seconds), statistics.median(cached)
        expected = statistics.median(num_bytes) / speed + computed * (1 - cached / options.prompt_tokens)
        print(f"| {name} | {cached:.0f} | {median:.3f} ({min(seconds):.3f} to {max(seconds):.3f}) | {median / computed:.3f} "
              f"| {expected:.3f} | {median / expected:.2f} |")


if __name__ == "__main__":
    main()
