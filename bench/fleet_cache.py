"""Plays a trace of conversations to one node, and to two nodes with half of its KV pages each.

    python bench/make_model.py small-32k
    python bench/fleet_cache.py target/release/corella bench/models/small-32k mooncake_conversation_trace.jsonl
    python bench/fleet_cache.py target/release/corella bench/models/small-32k mooncake_conversation_trace.jsonl --quick

TRACE has Mooncake's format: a request a line, with `timestamp`, `input_length`, `output_length` and `hash_ids`, one for
each 512 tokens. Lengths are divided by 32, so that a hash id is a KV page of 16 tokens. The mock executor computes
nothing and caches like any other; requests of one timestamp run together, and the next timestamp waits for their end.

Requests to two nodes go to the one with fewer tokens so far of the same timestamp, in turn if equal. With fetching, a
request names the other node if that is known to have more of its blocks: it got the last request with the block.

The result is the number of computed prompt tokens, from `/metrics`.
"""

import argparse
import contextlib
import itertools
import json
import random
import signal
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from node_process import NodeProcess, complete

SCALE = 32
PAGE_TOKENS = 512 // SCALE
MAX_TOGETHER = 16
NODE = ("--device", "mock", "--max-num-seqs", 64)
FETCHING = ("--cluster-listen", "127.0.0.1:0", "--block-fetch", "always")


class Request:
    def __init__(self, fields):
        self.timestamp = fields["timestamp"]
        self.hash_ids = fields["hash_ids"]
        self.num_prompt = max(1, fields["input_length"] // SCALE)
        self.num_answer = max(1, fields["output_length"] // SCALE)

    def prompt(self):
        tokens = itertools.chain.from_iterable(map(block, self.hash_ids))
        return list(itertools.islice(tokens, self.num_prompt))


def block(hash_id):
    """Returns the tokens of a block id. Equal ids have equal tokens, and different ids have different ones."""
    draw = random.Random(hash_id)
    return [draw.randrange(300, 2000) for _ in range(PAGE_TOKENS)]


def read(trace, limit):
    return [Request(json.loads(line)) for line in trace.read_text().splitlines()[:limit]]


def page_bytes(model):
    """Returns the bytes of a page's keys and values, which the mock counts in f32."""
    config = json.loads((model / "config.json").read_text())
    return PAGE_TOKENS * 2 * 4 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]


class Router:
    """Chooses nodes by their load, and remembers which node has which block."""

    def __init__(self, nodes, names_holders):
        self._nodes = nodes
        self._sites = [node.cached_blocks() for node in nodes] if names_holders else None
        self._holders = {}
        self._loads = [0] * len(nodes)
        self._turn = 0

    def begin(self):
        """Resets the load."""
        self._loads = [0] * len(self._nodes)

    def place(self, request):
        """Returns a node for the request, and the fields by which the request names a source of blocks, if any."""
        self._turn += 1
        in_turn = lambda at: (self._loads[at], (at + self._turn) % len(self._nodes))
        chosen = min(range(len(self._nodes)), key=in_turn)
        self._loads[chosen] += request.num_prompt + request.num_answer
        known = (self._holders.get(hash_id) for hash_id in reversed(request.hash_ids))
        holder = next((node for node in known if node is not None), chosen)
        for hash_id in request.hash_ids:
            self._holders[hash_id] = chosen
        if holder == chosen or self._sites is None:
            return self._nodes[chosen], {}
        return self._nodes[chosen], {"kv_transfer_params": self._sites[holder]}


class Replay:
    """The counters of a replay, summed over the nodes."""

    def __init__(self, nodes, seconds):
        total = lambda name, **labels: sum(node.metric(name, **labels) for node in nodes)
        self.num_prompt = total("corella_prompt_tokens_total")
        self.num_computed = self.num_prompt - total("corella_prefix_cache_hits_total")
        self.num_fetched = PAGE_TOKENS * total("corella_fetched_blocks_total")
        self.num_loads = total("corella_block_loads_total", outcome="loaded")
        self.num_failed = total("corella_block_loads_total", outcome="failed")
        self.seconds = seconds


def play(requests, nodes, names_holders):
    router = Router(nodes, names_holders)
    # Each connection carries one request at a time.
    idle = [[(node, node.connect()) for _ in range(MAX_TOGETHER)] for node in nodes]
    idle = {node: [connection for _, connection in pairs] for node, pairs in zip(nodes, idle)}

    def ask(request, node, fields):
        connection = idle[node].pop()
        complete(connection, request.prompt(), request.num_answer, temperature=0, **fields)
        idle[node].append(connection)

    begun = time.monotonic()
    num_done = 0
    with ThreadPoolExecutor(MAX_TOGETHER) as pool:
        for _, together in itertools.groupby(requests, key=lambda request: request.timestamp):
            router.begin()
            asked = [pool.submit(ask, request, *router.place(request)) for request in together]
            for answer in asked:
                answer.result()
            if num_done // 1000 != (num_done + len(asked)) // 1000:
                print(f"{num_done + len(asked)} requests, {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)
            num_done += len(asked)
    return Replay(nodes, time.monotonic() - begun)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary", metavar="CORELLA")
    parser.add_argument("model", metavar="MODEL", type=Path, help="a folder; its context is 4,096 tokens or more")
    parser.add_argument("trace", metavar="TRACE", type=Path)
    parser.add_argument("--requests", type=int, help="from the beginning of the trace [default: all]")
    parser.add_argument("--pages", type=int, nargs="+", default=[10_000, 30_000], help="of one node; two have half of them each")
    parser.add_argument("--quick", action="store_true", help="2,000 requests, and 6,000 pages")
    parser.add_argument("--json", type=Path, help="a file for the numbers")
    options = parser.parse_args()
    if options.quick:
        options.requests, options.pages = 2000, [6000]
    # Servers end with this program.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    requests = read(options.trace, options.requests)
    ways = {
        "one node": (1, (), False),
        "two nodes": (2, (), False),
        "two nodes that fetch": (2, FETCHING, True),
    }
    print(f"{len(requests)} requests, lengths divided by {SCALE}\n")
    print("| pages | | prompt tokens | computed | to one node | fetched | loads | failed loads | s |")
    print("|---|---|---|---|---|---|---|---|---|")
    rows = []
    for num_pages in options.pages:
        alone = None
        for name, (num_nodes, more, names_holders) in ways.items():
            memory = num_pages // num_nodes * page_bytes(options.model)
            with contextlib.ExitStack() as stack:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                nodes = []
                for at in range(num_nodes):
                    arguments = (*NODE, *more, "--kv-cache-memory", memory)
                    nodes.append(NodeProcess(options.binary, (options.model, *arguments), folder / f"{at}.log"))
                    stack.callback(nodes[-1].stop)
                for node in nodes:
                    node.wait_ready()
                    assert node.num_pages() == num_pages // num_nodes
                replay = play(requests, nodes, names_holders)
            alone = alone or replay
            ratio = replay.num_computed / alone.num_computed
            rows.append({"pages": num_pages, "name": name, "to_one_node": ratio, **vars(replay)})
            print(f"| {num_pages:,} | {name} | {replay.num_prompt:,.0f} | {replay.num_computed:,.0f} | {ratio:.3f} "
                  f"| {replay.num_fetched:,.0f} | {replay.num_loads:,.0f} | {replay.num_failed:,.0f} | {replay.seconds:.0f} |",
                  flush=True)
    if options.json:
        options.json.write_text("\n".join(map(json.dumps, rows)) + "\n")


if __name__ == "__main__":
    main()
