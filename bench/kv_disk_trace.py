"""Plays a trace of conversations to a node whose KV cache is much smaller than its `--kv-disk`.

    python bench/make_model.py small-32k
    python bench/kv_disk_trace.py target/release/corella bench/models/small-32k mooncake_conversation_trace.jsonl

TRACE has Mooncake's format: a request a line, with `hash_ids`, one for each 512 tokens. Each id is a KV page of 16 tokens
here, and a token after them is computed for its logits. The mock executor computes nothing and caches like any other.
With the disk, its prompts take longer than reads, so that the disk is used. Requests come one after the other.

The share of blocks that were cached, beside that of a cache of the disk's size that drops the least recently used block
first, and that of a cache without limits:

* memory: without `--kv-disk`;
* memory and disk: with it.
"""

import argparse
import collections
import contextlib
import functools
import json
import signal
import sys
import tempfile
import time
from pathlib import Path

from fleet_cache import PAGE_TOKENS, block, page_bytes
from node_process import NodeProcess, complete

LAST_TOKEN = 299
PROBE_BYTES = 1 << 28
SECTOR = 512


def read(trace, limit):
    return [json.loads(line)["hash_ids"] for line in trace.read_text().splitlines()[:limit]]


def lru_hits(prompts, size):
    """Returns the number of blocks that a cache of this size finds. A block counts after all blocks before it."""
    cached, num_hits = collections.OrderedDict(), 0
    for prompt in prompts:
        for block in prompt:
            if block not in cached:
                break
            num_hits += 1
        # The last block of a prompt is the first to go.
        for block in reversed(prompt):
            cached[block] = True
            cached.move_to_end(block)
        while len(cached) > size:
            cached.popitem(last=False)
    return num_hits


class Bench:
    def __init__(self, options, folder):
        self.options = options
        self.folder = folder
        self.block = functools.cache(block)
        self.prompts = read(options.trace, options.requests)
        self.num_blocks = sum(map(len, self.prompts))
        self.num_distinct = len({block for prompt in self.prompts for block in prompt})

    def start(self, *more):
        memory = self.options.pages * page_bytes(self.options.model)
        limits = ["--device", "mock", "--kv-cache-memory", memory]
        node = NodeProcess(self.options.binary, [self.options.model, *limits, *more], self.folder / "log")
        node.wait_ready()
        assert node.num_pages() == self.options.pages
        return node

    def start_with_disk(self, num_bytes):
        disk = ["--kv-disk", f"{self.folder / 'kv'},{num_bytes}"]
        node = self.start(*disk, "--mock-token-us", self.options.token_us)
        while node.metric("corella_kv_disk_on") == 0:
            time.sleep(0.05)
        return node

    def slot_bytes(self):
        """Returns the bytes that a block takes in the file, which is a number of whole sectors."""
        node = self.start_with_disk(PROBE_BYTES)
        num_slots = node.metric("corella_kv_disk_max_blocks")
        node.stop()
        return round(PROBE_BYTES / num_slots / SECTOR) * SECTOR

    def tokens(self, prompt):
        return [token for hash_id in prompt for token in self.block(hash_id)] + [LAST_TOKEN]

    def play(self, node):
        """Returns the number of blocks that were cached."""
        connection = node.connect()
        for at, prompt in enumerate(self.prompts):
            complete(connection, self.tokens(prompt), 1, temperature=0)
            if at % 1000 == 999:
                hits = node.metric("corella_prefix_cache_hits_total") / PAGE_TOKENS
                print(f"{at + 1} requests, {hits:,.0f} hits", file=sys.stderr, flush=True)
        return node.metric("corella_prefix_cache_hits_total") / PAGE_TOKENS

    def share(self, num_hits):
        return f"{100 * num_hits / self.num_blocks:.2f} %"

    def run(self):
        print(f"{len(self.prompts):,} requests of {self.num_blocks:,} blocks, {self.num_distinct:,} of them distinct; "
              f"{self.options.pages:,} pages in memory; {self.options.token_us} us a token\n")  # fmt: skip
        node = self.start()
        alone = self.play(node)
        node.stop()
        slot_bytes = self.slot_bytes()
        print("| blocks on the disk | memory | memory and disk | LRU of the disk's size | unbounded | stored | read | s |")
        print("|---|---|---|---|---|---|---|---|")
        for share in self.options.shares:
            for file in (self.folder / "kv").iterdir():
                file.unlink()
            node = self.start_with_disk(int(self.num_distinct * share) * slot_bytes)
            num_slots = int(node.metric("corella_kv_disk_max_blocks"))
            begun = time.monotonic()
            together = self.play(node)
            seconds = time.monotonic() - begun
            stored, read = node.metric("corella_kv_disk_blocks_stored_total"), node.metric("corella_kv_disk_hits_total")
            node.stop()
            expected, most = lru_hits(self.prompts, num_slots), lru_hits(self.prompts, self.num_distinct)
            shares = map(self.share, (alone, together, expected, most))
            print(f"| {num_slots:,} | {' | '.join(shares)} | {stored:,.0f} | {read:,.0f} | {seconds:.0f} |", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary", metavar="CORELLA")
    parser.add_argument("model", metavar="MODEL", type=Path, help="a folder; its context is 4,096 tokens or more")
    parser.add_argument("trace", metavar="TRACE", type=Path)
    parser.add_argument("--requests", type=int, help="from the beginning of the trace [default: all]")
    parser.add_argument("--pages", type=int, default=4000, help="in memory")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.25, 0.5], help="of the distinct blocks, on the disk")
    parser.add_argument("--token-us", type=float, default=60, help="the time of a token of a prompt")
    parser.add_argument("--folder", help="a folder on the disk")
    options = parser.parse_args()
    # Servers end with this program.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kv-disk-", dir=options.folder))
        Bench(options, Path(folder)).run()


if __name__ == "__main__":
    main()
