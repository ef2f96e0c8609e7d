"""Serves requests for a long time while clients leave and nodes are killed, and finds leaked resources.

    CORELLA_BIN=target/release/corella python tests/client/soak.py --seconds 3600 --svg soak.svg

One prefill node and one decode node are never restarted, and are measured. One more of each is killed and restarted
repeatedly. The program fails if a resource is left over, a process grows with the number of requests, a request to the
measured prefill node fails, or the same request gets two different answers.
"""

import argparse
import contextlib
import http.client
import json
import os
import random
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from fleet import HOLDINGS, Etcd, Fleet, prompt_of, wait_at_rest, wait_for_decode_nodes
from patience import PATIENCE_S, wait_until

NUM_CLIENTS = 8
# A node opens up to two connections to each of the two nodes of the other role when it first looks for blocks there,
# which few requests do.
MAX_LATE_FILES = 4
# Different requests, so that each is repeated often, and must get the same answer.
NUM_REQUESTS = 200
CANCELLED = 0.05
TIMED_OUT = 0.01
SAMPLE_INTERVAL_S = 1.0
# The allowed growth of a process over 10,000 requests.
MAX_GROWTH = 1e6
# Ended requests are remembered for a minute, and the allocator needs a while to settle.
SETTLED_AFTER_S = 90.0
# Limits the points of a plot's curve.
MAX_POINTS = 240
# In a short run, memory grows for other reasons than requests.
MAX_SHORT_GROWTH = 16e6


@dataclass
class Totals:
    num_answered: int = 0
    num_left: int = 0
    # Requests whose prefill node was killed.
    num_lost: int = 0
    num_kills: int = 0
    wrong: list = field(default_factory=list)

    @property
    def num_requests(self):
        return self.num_answered + self.num_left + self.num_lost


class Node:
    """A node and the observations of its process."""

    def __init__(self, name, server):
        self.name, self.server = name, server
        self.samples = []

    def sample(self, at_s, num_requests):
        self.samples.append({"at_s": at_s, "num_requests": num_requests} | self.now())

    def now(self):
        process = Path("/proc") / str(self.server.process.pid)
        status = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
        return {
            "rss_bytes": 1024 * int(status["VmRSS"].split()[0]),
            "threads": int(status["Threads"]),
            "files": len(os.listdir(process / "fd")),
        } | {name.removeprefix("corella_"): self.server.metric(name) for name in HOLDINGS}

    def growth(self):
        """Returns the growth in bytes over 10,000 requests, by least squares."""
        end_s = self.samples[-1]["at_s"]
        from_s = min(SETTLED_AFTER_S, end_s / 2)
        settled = [sample for sample in self.samples if sample["at_s"] >= from_s]
        x = [sample["num_requests"] for sample in settled]
        y = [sample["rss_bytes"] for sample in settled]
        mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
        variance = sum((at - mean_x) ** 2 for at in x)
        slope = sum((at - mean_x) * (byte - mean_y) for at, byte in zip(x, y)) / max(variance, 1)
        return 1e4 * slope


class Soak:
    def __init__(self, seconds, kill_interval_s, device="mock", transport="auto", num_kills=0):
        """Runs for at least this long, and until this many nodes were killed."""
        self.seconds, self.kill_interval_s, self.num_kills = seconds, kill_interval_s, num_kills
        self.arguments = ("--device", device, "--transport", transport)
        self.arguments += ("--threads", 1, "--kv-cache-memory", "16M")
        self.totals = Totals()
        self.answers = {}
        self.lock = threading.Lock()
        self.has_ended = threading.Event()

    def run(self):
        """Returns the measured nodes with their observations, and the faults."""
        with Etcd() as etcd, Fleet(f"etcd:{etcd.address}/soak") as self.fleet:
            self.decode = [self._start("decode", index) for index in range(2)]
            self.prefill = [self._start("prefill", index) for index in range(2)]
            for server in self.prefill:
                wait_for_decode_nodes(server, 2)
            measured = [Node("prefill", self.prefill[0]), Node("decode", self.decode[0])]
            # Most connections are open before the first measurement.
            self._serve_some()
            self._wait_at_rest()
            self.before = {node.name: node.now() for node in measured}
            began_at = time.monotonic()
            threads = [threading.Thread(target=self._sample, args=(measured, began_at))]
            threads += [threading.Thread(target=self._kill)]
            for thread in threads:
                thread.start()
            self._serve_until(
                lambda: time.monotonic() >= began_at + self.seconds and self.totals.num_kills >= self.num_kills
            )
            self.has_ended.set()
            for thread in threads:
                thread.join()
            for server in self.prefill:
                wait_for_decode_nodes(server, 2)
            self._serve_some()
            self._wait_at_rest()
            self._compare(measured, began_at)
        return measured

    def _start(self, role, index):
        return self.fleet.node(role, "--node-id", f"{role}-{index}", *self.arguments)

    def _serve_some(self):
        """Serves enough requests that each prefill node has used each decode node."""
        enough = self.totals.num_requests + NUM_REQUESTS
        self._serve_until(lambda: self.totals.num_requests >= enough)

    def _serve_until(self, is_over):
        threads = [threading.Thread(target=self._ask_until, args=(is_over, seed)) for seed in range(NUM_CLIENTS)]
        for client in threads:
            client.start()
        for client in threads:
            client.join()

    def _ask_until(self, is_over, seed):
        numbers = random.Random(f"{seed} {self.totals.num_requests}")
        while not is_over():
            is_measured = numbers.random() < 0.5
            server = self.prefill[0 if is_measured else 1]
            number = numbers.randrange(NUM_REQUESTS)
            leaves = numbers.random()
            try:
                if leaves < TIMED_OUT:
                    answer = ask(server, number, leaves_after_s=numbers.random() / 50)
                elif leaves < TIMED_OUT + CANCELLED:
                    answer = ask(server, number, num_chunks=numbers.randrange(8))
                else:
                    answer = ask(server, number)
            except (OSError, http.client.HTTPException) as error:
                with self.lock:
                    self.totals.num_lost += 1
                    if is_measured:
                        self.totals.wrong.append(f"a request to the measured node failed: {error!r}")
                # The request's node is being restarted.
                time.sleep(0.05)
                continue
            with self.lock:
                if answer is None:
                    self.totals.num_left += 1
                    continue
                self.totals.num_answered += 1
                if self.answers.setdefault(number, answer) != answer:
                    self.totals.wrong.append(f"request {number}: {answer} is not {self.answers[number]}")

    def _kill(self):
        numbers = random.Random(1)
        while not self.has_ended.wait(self.kill_interval_s * (0.5 + numbers.random())):
            role = numbers.choice(["prefill", "decode"])
            nodes = self.prefill if role == "prefill" else self.decode
            nodes[1].kill()
            self.totals.num_kills += 1
            nodes[1] = self._start(role, 1)

    def _sample(self, measured, began_at):
        while not self.has_ended.wait(SAMPLE_INTERVAL_S):
            for node in measured:
                node.sample(time.monotonic() - began_at, self.totals.num_requests)

    def _wait_at_rest(self):
        wait_at_rest(*self.prefill, *self.decode)

    def _compare(self, measured, began_at):
        """Compares the end with the start: the processes' holdings, after enough time to release them."""
        for node in measured:
            before = self.before[node.name]
            most = {"threads": before["threads"], "files": before["files"] + MAX_LATE_FILES}

            def left_over():
                return {name: (most[name], num) for name in most if (num := node.now()[name]) > most[name]}

            try:
                wait_until(lambda: not left_over(), lambda: f"what is left over goes: {left_over()}")
            except AssertionError as error:
                self.totals.wrong.append(f"{node.name} node: {error}")
            node.sample(time.monotonic() - began_at, self.totals.num_requests)
            growth = node.growth()
            is_long = self.seconds > 2 * SETTLED_AFTER_S
            if growth > MAX_GROWTH and (
                is_long or node.samples[-1]["rss_bytes"] - before["rss_bytes"] > MAX_SHORT_GROWTH
            ):
                self.totals.wrong.append(
                    f"{node.name} node: grows by {growth / 1e6:.2f} MB over 10,000 requests"
                )


def ask(server, number, num_chunks=None, leaves_after_s=None):
    """Returns the text and the end of an answer, or None if the client left before.

    The client leaves after this many chunks, or after this long.
    """
    numbers = random.Random(number)
    beginning = prompt_of(128, seed=number % 7)
    prompt = beginning[: numbers.choice([0, 16, 128])] + prompt_of(numbers.randrange(1, 200), number)
    fields = {"prompt": prompt, "max_tokens": numbers.randrange(1, 40), "stream": True}
    fields |= {"temperature": number % 2, "seed": number, "model": server.model()}
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)) as connection:
        connection.request("POST", "/v1/completions", json.dumps(fields))
        if leaves_after_s is not None:
            time.sleep(leaves_after_s)
            return None
        response = connection.getresponse()
        if response.status != 200:
            raise http.client.HTTPException(response.status, response.read())
        text, reason = "", None
        for line in response:
            if num_chunks == 0:
                return None
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line.removeprefix(b"data: "))
            if "error" in event:
                raise http.client.HTTPException(event)
            num_chunks = None if num_chunks is None else num_chunks - 1
            text += event["choices"][0]["text"]
            reason = event["choices"][0]["finish_reason"]
        if reason is None:
            raise http.client.IncompleteRead(text.encode())
        return text, reason


def report(soak, measured):
    totals = soak.totals
    lines = [
        f"{totals.num_requests} requests: {totals.num_answered} answered, {totals.num_left} left by their "
        f"clients, {totals.num_lost} lost with their prefill node; {totals.num_kills} nodes killed",
        "",
        "| node | | start | end | most |",
        "|---|---|---|---|---|",
    ]
    for node in measured:
        before, end = soak.before[node.name], node.samples[-1]
        for name in before:
            scale = 1e6 if name == "rss_bytes" else 1
            most = max(sample[name] for sample in node.samples)
            title = "resident memory, MB" if name == "rss_bytes" else name.replace("_", " ")
            cells = [f"{value / scale:.1f}" if scale > 1 else f"{value:.0f}" for value in (before[name], end[name], most)]
            lines.append(f"| {node.name} | {title} | {' | '.join(cells)} |")
        lines.append(f"| {node.name} | growth over 10,000 requests, MB | | {node.growth() / 1e6:.3f} | |")
    return "\n".join(lines)


def plot(measured):
    """Returns an SVG with a row for each kind of resource that a process holds, over time."""
    width, height, left, gap = 760, 90, 70, 34
    colours = {"prefill": "#1f77b4", "decode": "#d62728"}
    rows = [name for name in measured[0].samples[0] if name not in ("at_s", "num_requests")]
    end_s = max(sample["at_s"] for node in measured for sample in node.samples)
    parts = []
    for row, name in enumerate(rows):
        top = row * (height + gap) + gap
        scale = 1e6 if name == "rss_bytes" else 1
        title = "resident memory, MB" if name == "rss_bytes" else name.replace("_", " ")
        most = max(1, max(sample[name] / scale for node in measured for sample in node.samples))
        parts.append(f'<text x="{left}" y="{top - 6}">{title}</text>')
        for share in (0, 0.5, 1):
            y = top + height * (1 - share)
            parts.append(f'<path d="M{left} {y:.1f}H{width}" stroke="#e4e4e4"/>')
            parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{most * share:.3g}</text>')
        for node in measured:
            points = " ".join(
                f"{left + (width - left) * sample['at_s'] / end_s:.1f},{top + height * (1 - sample[name] / scale / most):.1f}"
                for sample in node.samples[:: max(1, len(node.samples) // MAX_POINTS)]
            )
            parts.append(f'<polyline points="{points}" fill="none" stroke="{colours[node.name]}"/>')
    bottom = len(rows) * (height + gap) + gap
    for index, (name, colour) in enumerate(colours.items()):
        parts.append(f'<text x="{left + 120 * index}" y="{bottom}" fill="{colour}">{name} node</text>')
    parts.append(f'<text x="{width}" y="{bottom}" text-anchor="end">{end_s:.0f} s</text>')
    style = "text{font:12px system-ui,sans-serif}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width + 20}" height="{bottom + 10}">'
        f"<style>{style}</style>{''.join(parts)}</svg>\n"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--kill-interval", type=float, default=5, help="seconds from one kill to the next, on average")
    parser.add_argument("--device", default="mock", choices=["mock", "cpu"])
    parser.add_argument("--transport", default="auto", help="as for corella serve")
    parser.add_argument("--svg", type=Path, help="write a plot here")
    parser.add_argument("--json", type=Path, help="write all samples here")
    options = parser.parse_args()
    soak = Soak(options.seconds, options.kill_interval, options.device, options.transport)
    measured = soak.run()
    print(report(soak, measured))
    if options.svg:
        options.svg.write_text(plot(measured))
    if options.json:
        options.json.write_text(json.dumps({node.name: node.samples for node in measured}))
    if soak.totals.wrong:
        sys.exit("\n".join(soak.totals.wrong[:20]))


if __name__ == "__main__":
    main()
