"""Measures what `--kv-disk` saves: times to the first token of prompts that memory has lost.

    python bench/kv_disk.py target/release/corella MODEL [--prompt-tokens 2048] [--rounds 5] [--folder FOLDER]
    python bench/kv_disk.py target/release/corella MODEL --prompt-tokens 16384 --prompts 6 --rounds 1 --size 14G
    python bench/kv_disk.py target/release/corella MODEL --turns --rounds 1

MODEL is a folder of `bench/make_model.py`, and FOLDER a folder on the disk. The KV cache has room for four of the prompts.
They are asked in turn, so that none is in memory when it comes again. Their last 64 tokens differ each time. With
`--turns`, 64 tokens are added each time instead, as in a conversation:

* computed: without `--kv-disk`;
* disk: with it;
* restart: with it, after SIGKILL. The file is dropped from the page cache before each request.

The closed form beside them: the bytes read for a prompt at the speed of the disk, which one thread measures in the same
run, and the prompt's other tokens at the measured speed of computing. `kv_disk_decode.py` measures requests beside, and
`kv_disk_llama.py` llama.cpp.
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

NUM_IN_MEMORY = 4
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


def make_prompts(options, length):
    """Returns prompts of tokens that are different in each."""
    draw = random.Random(options.prompt_tokens)
    return [[draw.randrange(256, 2000) for _ in range(length)] for _ in range(options.prompts)]


def spread(values, digits=3):
    """Returns the median, with the lowest and the highest value."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


class Bench:
    def __init__(self, options, folder):
        self.options = options
        self.folder = Path(folder)
        self.disk = ["--kv-disk", f"{self.folder / 'kv'},{options.size}"]
        self.prompts = make_prompts(options, options.prompt_tokens - NUM_NEW)
        # The new tokens of all rounds.
        self.num_turns = 2 * options.rounds + 1 if options.turns else 1
        self.memory = "256M"
        node = self.start()
        tokens = node.num_pages() * 16
        node.stop()
        self.memory = f"{256 * NUM_IN_MEMORY * options.prompt_tokens // tokens + 1}M"

    def start(self, *more):
        longest = self.options.prompt_tokens + NUM_NEW * self.num_turns
        limits = ["--max-model-len", longest, "--kv-cache-memory", self.memory]
        node = NodeProcess(self.options.binary, [self.options.model, *limits, *more], self.folder / "log")
        node.wait_ready()
        return node

    def ask_all(self, node, turn, before=lambda: None):
        """Asks each prompt. Returns seconds to the first token, with cached and other tokens and bytes read from the disk."""
        rows = []
        turns = range(turn + 1) if self.options.turns else [turn]
        for prompt in self.prompts:
            before()
            num_bytes = node.metric("corella_kv_disk_read_bytes_total")
            asked = prompt + [300 + turn for turn in turns for _ in range(NUM_NEW)]
            seconds, _, cached = time_first_token(node.connect(), asked, 1, temperature=0)
            num_bytes = node.metric("corella_kv_disk_read_bytes_total") - num_bytes
            rows.append((seconds, cached, len(asked) - cached, num_bytes))
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
        rounds = self.options.rounds
        node = self.start()
        for turn in range(rounds):
            rows["computed"] += self.ask_all(node, turn)
        node.stop()
        node = self.start(*self.disk)
        self.ask_all(node, 0)
        self.wait_stored(node)
        for turn in range(1, rounds + 1):
            rows["disk"] += self.ask_all(node, turn)
        self.wait_stored(node)
        [file] = [file for file in (self.folder / "kv").iterdir() if file.stat().st_size > 1 << 20]
        for turn in range(rounds + 1, 2 * rounds + 1):
            os.kill(node.pid, signal.SIGKILL)
            node.stop()
            node = self.start(*self.disk)
            while node.metric("corella_kv_disk_blocks") == 0:
                time.sleep(0.05)
            rows["restart"] += self.ask_all(node, turn, lambda: drop(file))
            self.wait_stored(node)
        node.stop()
        return rows, measure_disk(file, 1 << 30)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("binary", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("--prompt-tokens", type=int, default=2048)
    parser.add_argument("--prompts", type=int, default=16, help="more than fit in memory, which has room for four")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--turns", action="store_true", help="prompts grow, as the turns of conversations")
    parser.add_argument("--folder", help="a folder on the disk")
    parser.add_argument("--size", default="4G", help="of the file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kv-disk-", dir=options.folder) as folder:
        bench = Bench(options, folder)
        rows, speed = bench.run()
    computed = statistics.median(seconds / num_computed for seconds, _, num_computed, _ in rows["computed"])
    whole = statistics.median(seconds for seconds, *_ in rows["computed"])
    grow = f" and {NUM_NEW} more with each turn" if options.turns else ""
    print(f"{options.model.name}, {options.prompts} prompts of {options.prompt_tokens} tokens{grow}, KV cache {bench.memory}, "
          f"disk {speed / 1e9:.2f} GB/s\n")  # fmt: skip
    print("| | cached | s to the first token (lowest to highest) | of computed | closed form, s | of the closed form |")
    print("|---|---|---|---|---|---|")
    for name, found in rows.items():
        seconds, cached, num_computed, num_bytes = map(list, zip(*found))
        median = statistics.median(seconds)
        expected = statistics.median(num_bytes) / speed + computed * statistics.median(num_computed)
        print(f"| {name} | {statistics.median(cached):.0f} | {spread(seconds)} "
              f"| {median / whole:.3f} | {expected:.3f} | {median / expected:.2f} |")


if __name__ == "__main__":
    main()
