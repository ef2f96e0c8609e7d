"""Measures the times between a request's tokens while `--kv-disk` stores prompts of others.

    python bench/kv_disk_decode.py target/release/corella MODEL [--prompt-tokens 2048] [--rounds 5] [--folder FOLDER]

MODEL is a folder of `bench/make_model.py`, and FOLDER a folder on the disk. A request decodes. Meanwhile prompts that
memory has are asked again, so that a token is computed for each, and the disk stores all of them. The same is measured
without `--kv-disk`. Both ways take turns.
"""

import argparse
import itertools
import json
import statistics
import tempfile
import threading
import time
from pathlib import Path

from kv_disk import make_prompts, spread
from node_process import NodeProcess, complete

PAGE_TOKENS = 16


def time_tokens(connection, prompt, num_tokens):
    """Streams an answer. Returns the times of its tokens."""
    body = {"prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True, "temperature": 0, "stream": True}
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    response = connection.getresponse()
    assert response.status == 200, response.read()
    return [time.perf_counter() for line in response if line.startswith(b"data: {")]


class Bench:
    def __init__(self, options, folder):
        self.options = options
        self.folder = Path(folder)
        self.prompts = make_prompts(options, options.prompt_tokens)

    def start(self, *more):
        limits = ["--max-model-len", self.options.prompt_tokens + 1024, "--kv-cache-memory", self.options.memory]
        node = NodeProcess(self.options.binary, [self.options.model, *limits, *more], self.folder / "log")
        node.wait_ready()
        # Nothing is evicted, so that all prompts are stored when they are asked again, and not before.
        needed = 2 * self.options.prompts * self.options.prompt_tokens // PAGE_TOKENS
        assert node.num_pages() > needed, f"{node.num_pages()} pages of KV cache, {needed} are needed: --memory"
        return node

    def measure(self, size):
        """Returns the times between tokens while prompts are asked again, in seconds, and the bytes stored meanwhile."""
        kv = self.folder / "kv"
        node = self.start(*(("--kv-disk", f"{kv},{size}") if size else ()))
        while size and node.metric("corella_kv_disk_on") == 0:
            time.sleep(0.05)
        for prompt in self.prompts:
            complete(node.connect(), prompt, 1, temperature=0)
        times = []
        decoding = threading.Thread(target=lambda: times.extend(time_tokens(node.connect(), [300] * 32, self.options.tokens)))
        stored = lambda: node.metric("corella_kv_disk_written_bytes_total") if size else 0
        before = stored()
        decoding.start()
        for prompt in self.prompts:
            complete(node.connect(), prompt, 1, temperature=0)
        decoding.join()
        num_bytes = stored() - before
        node.stop()
        for file in kv.glob("*"):
            file.unlink()
        return [after - before for before, after in itertools.pairwise(times)], num_bytes


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("binary", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("--prompt-tokens", type=int, default=2048)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256, help="of the request that decodes")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", help="a folder on the disk")
    parser.add_argument("--memory", default="5G", help="of the KV cache, which needs room for the prompts twice")
    parser.add_argument("--size", default="4G", help="of the file")
    options = parser.parse_args()
    gaps, stored = {"without": [], "storing": []}, []
    with tempfile.TemporaryDirectory(prefix="kv-disk-", dir=options.folder) as folder:
        bench = Bench(options, folder)
        for _ in range(options.rounds):
            gaps["without"].append(bench.measure(None)[0])
            found, num_bytes = bench.measure(options.size)
            gaps["storing"].append(found)
            stored.append(num_bytes)
    print(f"{options.model.name}, {options.tokens} tokens beside {options.prompts} prompts of {options.prompt_tokens} tokens, "
          f"{statistics.median(stored) / 1e6:.0f} MB stored\n")  # fmt: skip
    print("| | ms between tokens, median | p99 of each round, median (lowest to highest) | longest |")
    print("|---|---|---|---|")
    for name, rounds in gaps.items():
        p99 = [1e3 * statistics.quantiles(found, n=100)[98] for found in rounds]
        every = [1e3 * gap for found in rounds for gap in found]
        print(f"| {name} | {statistics.median(every):.2f} | {spread(p99, 2)} | {max(every):.1f} |")


if __name__ == "__main__":
    main()
