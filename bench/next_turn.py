"""Measures the time to the first token of a conversation's second turn, on two nodes and on one.

    python bench/next_turn.py target/release/corella bench/models/small-24l --json next-turn.json --svg next-turn.svg
    python bench/next_turn.py target/release/corella --quick

MODEL is a folder, by default bench/models/small-24l, which is made if missing (that needs numpy and tokenizers). Each
node has one thread, and one request runs at a time. A turn is a prompt and an answer; the next prompt is both and 32
new tokens. The prefill node still has the first prompt, and the decode node has the prompt and the answer:

* recompute: the prefill node computes the answer's tokens again (--block-fetch off --next-turn prefill);
* pull: it fetches them from the decode node (--block-fetch always);
* decode-local: the decode node computes the new tokens (--next-turn decode);
* auto: the default;
* aggregated: one process has everything.

Then the same turn comes to a prefill node that has no part of the conversation. It computes all of it, or fetches it
from the decode node, which the request names.

Each round has new tokens, and its modes take turns.
"""

import argparse
import contextlib
import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from next_turn_plot import plot
from node_process import NodeProcess, complete, time_first_token

DEFAULT_MODEL = Path(__file__).parent / "models/small-24l"
NEW_TOKENS = 32
# Nodes report their load to each other once a second, and people read an answer before their next message.
THINK_S = 1.5
# The first token may come from either node. The second token comes from the decode node.
TURN_TOKENS = 4

# A node lends a quarter of its pages, which is enough for the longest turn.
NODE = ("--threads", 1, "--max-num-seqs", 8, "--kv-cache-memory", "1G")
# On a machine with other work, an answer may be late.
PAIR = ("--decode-search-timeout", 5000, "--kv-load-timeout", 10000)
OPTIONS = {
    "recompute": ("--block-fetch", "off", "--next-turn", "prefill"),
    "pull": ("--block-fetch", "always"),
    "decode-local": ("--block-fetch", "off", "--next-turn", "decode"),
    "auto": (),
}
ALONE = "aggregated"
MODES = (*OPTIONS, ALONE)
# Modes that differ on a prefill node without any part of the conversation.
MODES_ELSEWHERE = ("recompute", "pull", "auto")
SAME, OTHER = "same prefill node", "another prefill node"


class Servers:
    """Nodes that serve in one mode."""

    def __init__(self, binary, model, mode, num_others, folder):
        start = lambda name, *options: NodeProcess(binary, (*model, *NODE, *options), folder / f"{mode}-{name}.log")
        if mode == ALONE:
            self._nodes = [start("alone")]
        else:
            pair = (*PAIR, "--registry", f"file:{folder / mode}", *OPTIONS[mode])
            # For each length of an answer, one prefill node has no part of a conversation yet.
            num_prefill = 1 + (num_others if mode in MODES_ELSEWHERE else 0)
            self._nodes = [start(f"prefill-{at}", "--role", "prefill", *pair) for at in range(num_prefill)]
            self._nodes.append(start("decode", "--role", "decode", *pair))
        self.front, self.decode = self._nodes[0], self._nodes[-1]
        self.others = self._nodes[1:-1]

    def wait_ready(self):
        for node in self._nodes:
            node.wait_ready()
        if self.front is not self.decode:
            for node in (self.front, *self.others):
                node.wait_for_decode_nodes(1)

    def stop(self):
        for node in self._nodes:
            node.stop()

    def way(self, node):
        """Returns the counters that show how a turn was served."""
        return {
            "there": node.metric("corella_pd_decisions_total", outcome="there"),
            "fetched": node.metric("corella_fetched_blocks_total"),
            "fallbacks": node.metric("corella_pd_fallbacks_total"),
        }


class Bench:
    def __init__(self, servers, places, prompts, answers, rounds):
        self.servers = servers
        self.places = places
        self.prompts = prompts
        self.answers = answers
        self.rounds = rounds
        self.samples = []

    def run(self):
        begun = time.monotonic()
        for round in range(self.rounds):
            for num_prompt in self.prompts:
                self._play(round, num_prompt)
                print(f"round {round + 1} of {self.rounds}, prompts of {num_prompt}: "
                      f"{time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)

    def _play(self, round, num_prompt):
        random_tokens = random.Random(f"{round} {num_prompt}")
        draw = lambda number: [random_tokens.randrange(256, 2000) for _ in range(number)]
        prompt = draw(num_prompt)
        order = MODES if round % 2 == 0 else MODES[::-1]
        for at, num_answer in enumerate(self.answers):
            # Answers of different lengths share only the prompt.
            drawing = {"temperature": 1.0, "seed": 1 + at}
            answers = {}
            for mode in order:
                connection = self.servers[mode].front.connect()
                answers[mode] = complete(connection, prompt, num_answer, **drawing)
            turn = prompt + answers[ALONE]
            assert all(answer == answers[ALONE] for answer in answers.values()), "all modes give the same tokens"
            time.sleep(THINK_S)
            cell = {"round": round, "prompt": num_prompt, "answer": num_answer}
            self._measure(cell, SAME, order, turn + draw(NEW_TOKENS), lambda servers: (servers.front, {}))
            if OTHER not in self.places:
                continue
            others = [mode for mode in order if mode in MODES_ELSEWHERE]

            def another(servers):
                hint = {"kv_transfer_params": servers.decode.cached_blocks()}
                return servers.others[at], hint

            self._measure(cell, OTHER, others, turn + draw(NEW_TOKENS), another)

    def _measure(self, cell, place, order, prompt, choose):
        firsts = set()
        for mode in order:
            servers = self.servers[mode]
            node, fields = choose(servers)
            before = servers.way(node)
            seconds, first, cached = time_first_token(node.connect(), prompt, TURN_TOKENS, temperature=0, **fields)
            way = {name: number - before[name] for name, number in servers.way(node).items()}
            firsts.add(first)
            sample = {**cell, "place": place, "mode": mode, "seconds": seconds, "cached": cached, "way": way}
            self.samples.append(sample)
            print(json.dumps(sample), file=sys.stderr, flush=True)
        assert len(firsts) == 1, "all modes give the same tokens"


class Cell:
    """The measurements for prompts and answers of one length at one place."""

    def __init__(self, samples, place, num_prompt, num_answer):
        self.place, self.num_prompt, self.num_answer = place, num_prompt, num_answer
        of_cell = lambda sample: (sample["prompt"], sample["answer"]) == (num_prompt, num_answer)
        self.samples = {}
        for sample in filter(of_cell, samples):
            # With one process there is only one place.
            if sample["place"] == place or sample["mode"] == ALONE:
                self.samples.setdefault(sample["mode"], []).append(sample)

    def modes(self):
        return [mode for mode in MODES if mode in self.samples]

    def times_ms(self, mode):
        return [sample["seconds"] * 1e3 for sample in self.samples[mode]]

    def median_ms(self, mode):
        return statistics.median(self.times_ms(mode))

    def best(self):
        return min((mode for mode in self.modes() if mode != "auto"), key=self.median_ms)

    def of_best(self):
        return self.median_ms("auto") / self.median_ms(self.best())

    def pull_of_recompute(self):
        return self.median_ms("pull") / self.median_ms("recompute")

    def choices(self):
        """Returns the automatic choices, with their frequencies."""
        counts = {}
        for sample in self.samples["auto"]:
            way = sample["way"]
            name = "decode-local" if way["there"] else "pull" if way["fetched"] else "recompute"
            counts[name] = counts.get(name, 0) + 1
        return ", ".join(f"{name} {count}" for name, count in counts.items())


def table(cells):
    lines = ["| turn at | prompt | answer | mode | TTFT, ms | lowest to highest | to recompute | cached tokens |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for cell in cells:
        for mode in cell.modes():
            times, median = cell.times_ms(mode), cell.median_ms(mode)
            cached = statistics.median(sample["cached"] for sample in cell.samples[mode])
            lines.append(
                f"| {cell.place} | {cell.num_prompt:,} | {cell.num_answer:,} | {mode} | {median:.1f} "
                f"| {min(times):.1f} to {max(times):.1f} | {median / cell.median_ms('recompute'):.3f} | {cached:,.0f} |"
            )
    lines += ["", "| turn at | prompt | answer | pull / recompute | best | auto / best | auto chose |"]
    lines.append("|---|---|---|---|---|---|---|")
    for cell in cells:
        lines.append(
            f"| {cell.place} | {cell.num_prompt:,} | {cell.num_answer:,} | {cell.pull_of_recompute():.3f} | {cell.best()} "
            f"| {cell.of_best():.3f} | {cell.choices()} |"
        )
    return "\n".join(lines)


def make(model):
    if model.exists():
        return
    maker = Path(__file__).parent / "make_model.py"
    subprocess.run([sys.executable, maker, model.name, "--out", model.parent], check=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary", metavar="CORELLA")
    parser.add_argument("model", nargs="?", type=Path, default=DEFAULT_MODEL)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, nargs="+", default=[1024, 8192], help="their lengths, in tokens")
    parser.add_argument("--answers", type=int, nargs="+", default=[50, 1000], help="their lengths, in tokens")
    parser.add_argument("--same-node", action="store_true", help="leave out turns at another prefill node")
    parser.add_argument("--quick", action="store_true", help="one round of short prompts to the built-in model")
    parser.add_argument("--json", type=Path, help="a file for all samples")
    parser.add_argument("--svg", type=Path, help="a file for the plot")
    options = parser.parse_args()
    model = [options.model]
    if options.quick:
        options.rounds, options.prompts, options.answers, model = 1, [128, 512], [20, 100], []
    else:
        make(options.model)
    # Servers end with this program.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    places = [SAME] if options.same_node else [SAME, OTHER]
    num_others = len(options.answers) if OTHER in places else 0
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers = {}
        for mode in MODES:
            servers[mode] = Servers(options.binary, model, mode, num_others, folder)
            stack.callback(servers[mode].stop)
        for of_mode in servers.values():
            of_mode.wait_ready()
        bench = Bench(servers, places, options.prompts, options.answers, options.rounds)
        bench.run()
    if options.json:
        options.json.write_text("\n".join(map(json.dumps, bench.samples)) + "\n")
    cells = [
        Cell(bench.samples, place, num_prompt, num_answer)
        for place in places
        for num_prompt in options.prompts
        for num_answer in options.answers
    ]
    print(table(cells))
    if options.svg:
        options.svg.write_text(plot(cells, MODES))


if __name__ == "__main__":
    main()
