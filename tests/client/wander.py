"""Plays conversations whose turns wander over nodes, and compares each answer with one process's.

    CORELLA_BIN=target/release/corella python tests/client/wander.py --requests 1000 --transport tcp

Two prefill and two decode nodes play the same conversations as three unified nodes. They fetch each other's cached
blocks on every path, from caches that are too small for all conversations. The program fails if an answer differs in a
token, or a log-probability in a bit, if a path was not used, or if a node still holds anything at the end.
`--model gemma3` has layers with a window. `--transport nixl` needs the library that `cargo xtask set-up` installs.
"""

import argparse
import collections
import contextlib
import itertools
import json
import os
import random
import re
import sys
import tempfile
import threading
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

import golden_model
from fleet import HOLDINGS, NIXL_LIBRARY, THREADS, Fleet, wait_at_rest
from pairing_proxy import post
from patience import PATIENCE_S
from server_process import ServerProcess

NUM_CLIENTS = 6
# Number of concurrent conversations. Together they are larger than a node's cache.
NUM_OPEN = 16
NUM_BEGINNINGS = 4
MAX_NEW_TOKENS = 150
MAX_OUTPUT_TOKENS = 48
ENDED_FETCH = re.compile(r"a fetch of cached blocks has ended source=(\S+) num_loaded=(\d+)")
PLACE = {
    "type": "object",
    "properties": {"town": {"enum": ["Lyon", "Ulm", "Bath"]}, "number": {"type": "integer", "minimum": 10, "maximum": 99}},
    "required": ["town", "number"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Model:
    """The requests to a model, and its nodes' memory for KV pages."""

    tokens: range
    max_len: int
    kv_memory: str
    stop: list
    # Constraints on answers, by fields of a request.
    formats: list
    # None is the built-in model.
    golden: str | None = None

    @contextlib.contextmanager
    def arguments(self):
        if self.golden is None:
            yield ()
            return
        with tempfile.TemporaryDirectory() as folder:
            yield (golden_model.make(self.golden, Path(folder)),)


MODELS = {
    "built-in": Model(
        tokens=range(300, 2000),
        max_len=1400,
        kv_memory="8M",
        stop=[" the", "."],
        formats=[
            {"response_format": {"type": "json_schema", "json_schema": {"name": "place", "schema": PLACE}}},
            {"structured_outputs": {"regex": "[A-Z][a-z]{2,6}( [a-z]{2,7}){3}\\."}},
        ],
    ),
    "gemma3": Model(
        tokens=range(3, 80),
        max_len=500,
        kv_memory="768K",
        stop=[golden_model.text_of([20]), golden_model.text_of([41])],
        formats=[{"structured_outputs": {"regex": f"[{golden_model.text_of([5])}-{golden_model.text_of([60])}]{{4,12}}"}}],
        golden="gemma3",
    ),
}


@dataclass
class Turn:
    new: list
    options: dict
    # The whole prompt, and one process's answer.
    prompt: list = None
    expected: list = None


@dataclass
class Talk:
    """A conversation, and the node of its last turn."""

    number: int
    turns: list
    next: int = 0
    last: ServerProcess = None


def talks(model, num_requests, seed):
    """Makes conversations with this many turns in total. Some conversations share a beginning."""
    draw = random.Random(seed)
    beginnings = [draw.choices(model.tokens, k=200) for _ in range(NUM_BEGINNINGS)]
    made = []
    while num_requests > 0:
        new = draw.choice(beginnings)[: draw.choice([0, 16, 64, 100, 200])]
        turns, num_tokens = [], 0
        for _ in range(min(draw.randrange(2, 8), num_requests)):
            new = new + draw.choices(model.tokens, k=num_new_tokens(draw))
            num_tokens += len(new) + MAX_OUTPUT_TOKENS
            if turns and num_tokens > model.max_len:
                break
            turns.append(Turn(new, options(model, draw)))
            new = []
        num_requests -= len(turns)
        made.append(Talk(len(made), turns))
    return made


def num_new_tokens(draw):
    return draw.choice([draw.randrange(1, 5), draw.randrange(1, 60), draw.randrange(60, MAX_NEW_TOKENS)])


def options(model, draw):
    greedy, seeded = {"temperature": 0}, {"temperature": 1.0, "seed": draw.randrange(1000)}
    either = draw.choice([greedy, seeded])
    drawn = draw.choice(
        [
            greedy,
            seeded,
            either | {"logprobs": 3},
            seeded | {"n": 2, "logprobs": 1},
            either | {"stop": model.stop},
            either | {"stop_token_ids": list(model.tokens[::8])},
            seeded | {"presence_penalty": 0.5, "frequency_penalty": 0.2},
            greedy | {"repetition_penalty": 1.2},
            seeded | draw.choice(model.formats),
        ]
    )
    has_format = any(name in drawn for name in ("response_format", "structured_outputs"))
    max_tokens = draw.choice([1, draw.randrange(2, 20), draw.randrange(17, MAX_OUTPUT_TOKENS)])
    limits = {"max_tokens": max_tokens, "ignore_eos": not has_format and draw.random() < 0.7}
    return drawn | limits | {"priority": draw.randrange(-1, 2)}


def ask(server, turn, site=None):
    """Returns everything that a client receives of each choice."""
    body = {"prompt": turn.prompt, "return_token_ids": True, **turn.options}
    if site:
        body["kv_transfer_params"] = {"cached_blocks": site}
    status, _, text = post(server.port, "/v1/completions", body)
    assert status == 200, text
    fields = json.loads(text)
    names = ("token_ids", "text", "finish_reason", "stop_reason", "logprobs")
    told = [{name: choice.get(name) for name in names} for choice in fields["choices"]]
    usage = fields["usage"]
    return told, usage["prompt_tokens"], usage["completion_tokens"]


def site_of(server):
    """Returns the fields by which a request has blocks fetched from a node."""
    with urllib.request.urlopen(server.base_url + "/role", timeout=PATIENCE_S) as role:
        return json.load(role)["cached_blocks"]


def loads(server):
    """Returns the number of fetched blocks in a node's log, by source node."""
    num_blocks = collections.Counter()
    for source, num_loaded in ENDED_FETCH.findall(server.log()):
        num_blocks[source] += int(num_loaded)
    return num_blocks


def play(talks, play_turn):
    """Plays conversations, some concurrently. A turn of one comes at random between turns of others."""
    waiting, lock, draw = collections.deque(talks), threading.Lock(), random.Random(len(talks))
    errors = []

    def work():
        while True:
            with lock:
                if not waiting or errors:
                    return
                talk = waiting.popleft()
            try:
                play_turn(talk, talk.turns[talk.next])
            except Exception as error:
                errors.append(error)
                raise
            with lock:
                talk.next += 1
                if talk.next < len(talk.turns):
                    waiting.insert(draw.randrange(NUM_OPEN), talk)

    for talk in talks:
        talk.next, talk.last = 0, None
    clients = [threading.Thread(target=work) for _ in range(NUM_CLIENTS)]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    if errors:
        raise errors[0]


def expect(talks, alone):
    """Has one process answer every turn, and stores the prompts and answers in the turns."""

    def play_turn(talk, turn):
        before = talk.turns[talk.next - 1] if talk.next else None
        turn.prompt = turn.new
        if before:
            turn.prompt = before.prompt + before.expected[0][0]["token_ids"] + turn.new
        turn.expected = ask(alone, turn)

    play(talks, play_turn)


@dataclass
class Report:
    """The nodes' work: blocks by fetching and source node, and decisions by computing node."""

    num_requests: int = 0
    num_blocks: dict = field(default_factory=dict)
    num_decisions: dict = field(default_factory=dict)
    num_failed_loads: int = 0
    num_evicted: int = 0
    differences: list = field(default_factory=list)

    def unused(self):
        """Returns the paths that were never taken."""
        counts = self.num_blocks | self.num_decisions | {"evicted": self.num_evicted}
        return [name for name, count in counts.items() if count == 0]

    def __str__(self):
        rows = [("requests", self.num_requests)]
        rows += [(f"blocks {path}", count) for path, count in self.num_blocks.items()]
        rows += [(f"decisions {place}", count) for place, count in self.num_decisions.items()]
        rows += [("failed loads", self.num_failed_loads), ("evicted pages", self.num_evicted)]
        rows += [("differences", len(self.differences))]
        return "\n".join(f"| {name} | {count:.0f} |" for name, count in rows)


class Wanderers:
    """Nodes among which conversations wander. Subclasses start them, and choose one for each turn."""

    # Pairs of roles between which blocks are fetched.
    PATHS = ()
    holdings = HOLDINGS

    def __init__(self, fleet, transport, arguments):
        self.transport = transport
        arguments = ("--transport", transport, *arguments)
        environment = {**os.environ, "RUST_LOG": "info,corella_cluster::blocks=debug"}
        # Each node with its role.
        self.nodes = self.start(fleet, *arguments, env=environment)
        self.sites = {node: site_of(node) for node, _ in self.nodes}

    def of(self, role):
        return [node for node, its in self.nodes if its == role]

    def play(self, talks):
        """Plays conversations whose answers are known."""
        report, lock = Report(), threading.Lock()

        def play_turn(talk, turn):
            draw = random.Random(f"{talk.number} {talk.next}")
            server, site = self.choose(draw, talk.last)
            answer = ask(server, turn, site)
            talk.last = server
            with lock:
                report.num_requests += 1
                if answer != turn.expected:
                    report.differences.append(
                        f"turn {talk.next} of conversation {talk.number}, {turn.options}:\n{answer}\nis not\n{turn.expected}"
                    )

        play(talks, play_turn)
        wait_at_rest(*(node for node, _ in self.nodes), holdings=self.holdings)
        self.count(report)
        return report

    def count(self, report):
        report.num_blocks = {f"{to} from {source}": 0 for to, source in self.PATHS}
        roles = {}
        for node, role in self.nodes:
            site = self.sites[node]
            roles[f"{site['host']}:{site['port']}"] = role
            if "socket" in site:
                roles[f"unix:{site['socket']}"] = role
        for node, role in self.nodes:
            num_fetched = lambda: node.metric("corella_fetched_blocks_total")
            node.wait_until(lambda: sum(loads(node).values()) == num_fetched(), "the log tells of every block")
            assert self.transport != "nixl" or "come by NIXL" in node.log(), node.log()
            for source, num_blocks in loads(node).items():
                assert source.startswith("unix:") == (self.transport == "shm"), source
                report.num_blocks[f"{role} from {roles[source]}"] += num_blocks
            report.num_failed_loads += node.metric("corella_block_loads_total", outcome="failed")
            report.num_evicted += node.metric("corella_kv_pages_evicted_total")


class Unified(Wanderers):
    PATHS = (("unified", "unified"),)
    # Unified nodes have no sessions.
    holdings = tuple(name for name in HOLDINGS if name != "corella_sessions")

    def start(self, fleet, *arguments, **options):
        arguments = ("--cluster-listen", "127.0.0.1:0", "--block-fetch", "always", *arguments)
        return [(fleet.enter_context(ServerProcess(*arguments, **options)), "unified") for _ in range(3)]

    def choose(self, draw, last):
        return draw.choice([node for node in self.of("unified") if node is not last]), self.sites.get(last)


class Pairs(Wanderers):
    """Two prefill and two decode nodes. The first prefill node fetches all blocks that it can.

    The second one fetches if that is faster, so that its decode nodes compute prompts, too.
    """

    PATHS = tuple((to, source) for to in ("prefill", "decode") for source in ("prefill", "decode"))

    def start(self, fleet, *arguments, **options):
        nodes = [(fleet.decode("--block-fetch", "always", *arguments, **options), "decode") for _ in range(2)]
        for fetch in ("always", "auto"):
            node = fleet.prefill("--block-fetch", fetch, *arguments, num_decode_nodes=2, **options)
            nodes.append((node, "prefill"))
        return nodes

    def choose(self, draw, last):
        """Returns a turn's node, and the source of cached blocks that the request names. Most turns go to the last
        turn's node and name no source, like clients' requests.

        Others go elsewhere, as by a router that knows each node's blocks. A decode node that a client addresses
        computes the prompt itself.
        """
        prefill, decode = self.of("prefill"), self.of("decode")
        if last is None:
            return draw.choice(prefill), None
        others = [node for node in prefill if node is not last]
        step = draw.random()
        if step < 0.55:
            return (last if last in prefill else draw.choice(prefill)), None
        if step < 0.75:
            return draw.choice(others), self.sites[last]
        if step < 0.85:
            return draw.choice(prefill), self.sites[draw.choice(decode)]
        return draw.choice([node for node in decode if node is not last]), self.sites[last]

    def count(self, report):
        super().count(report)
        for place in ("here", "there"):
            counts = [node.metric("corella_pd_decisions_total", outcome=place) for node in self.of("prefill")]
            report.num_decisions[place] = sum(counts)


FLEETS = {"pairs": Pairs, "unified": Unified}


@contextlib.contextmanager
def answered(model, num_requests, seed=1):
    """Yields the arguments of a model's nodes, and conversations with the answers of one process."""
    with model.arguments() as arguments:
        arguments = (*arguments, *THREADS, "--scheduling-policy", "priority")
        made = talks(model, num_requests, seed)
        with ServerProcess(*arguments) as alone:
            expect(made, alone)
        yield arguments, made


def wander(kind, model, transport, arguments, talks):
    """Plays conversations on new nodes."""
    if transport == "nixl":
        os.environ.setdefault("CORELLA_NIXL_LIBRARY", str(NIXL_LIBRARY))
    with Fleet() as fleet:
        return FLEETS[kind](fleet, transport, (*arguments, "--kv-cache-memory", model.kv_memory)).play(talks)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=1000, help="turns of all conversations")
    parser.add_argument("--transport", default="tcp", help="tcp, shm, nixl, or several with commas between")
    parser.add_argument("--model", default="built-in", choices=list(MODELS))
    parser.add_argument("--fleets", default=",".join(FLEETS), help="with commas between")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    wrong = []
    with answered(MODELS[given.model], given.requests, given.seed) as (arguments, made):
        for transport, kind in itertools.product(given.transport.split(","), given.fleets.split(",")):
            began_at = time.monotonic()
            report = wander(kind, MODELS[given.model], transport, arguments, made)
            seconds = time.monotonic() - began_at
            print(f"{kind} over {transport}, {given.model}, {seconds:.0f} s\n{report}", flush=True)
            wrong += report.differences
            wrong += [f"{kind} over {transport}: nothing is counted for {name}" for name in report.unused()]
    if wrong:
        sys.exit("\n".join(wrong[:20]))


if __name__ == "__main__":
    main()
