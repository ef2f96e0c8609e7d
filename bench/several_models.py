"""Measures what several models in one server cost, beside servers with one model.

    python bench/several_models.py target/release/corella MODEL OTHER_MODEL [--rounds 5] [-- ARGS of corella serve]

* cold: the first token of a request whose model is not loaded, beside that of `corella serve MODEL`, which is started for
  the request;
* one: the throughput of `corella bench serve` with a model that may be unloaded, beside `corella serve MODEL`;
* busy: both models at once, beside one after the other;
* wake: the first token of a request that starts the server, through a socket as systemd passes it, beside that of a
  running server.

The sides of a comparison alternate. Ratios are medians of the rounds, with the lowest and the highest value.
"""

import argparse
import contextlib
import http.client
import json
import os
import select
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

from node_process import NodeProcess, free_port, time_first_token

PROMPT = [3 + 7 * at % 50 for at in range(64)]
PARTS = ("cold", "one", "busy", "wake")
# The shell's standard input becomes the socket that the server takes.
ACTIVATE = 'export LISTEN_PID=$$ LISTEN_FDS=1; exec "$@" 3<&0 </dev/null'


class Bench:
    def __init__(self, options, arguments, folder):
        self.options, self.folder = options, Path(folder)
        self.models = [options.model, options.other]
        self.names = [Path(model).name.removesuffix(".gguf") for model in self.models]
        self.arguments = arguments

    @contextlib.contextmanager
    def server(self, *words):
        server = NodeProcess(self.options.binary, [*words, *self.arguments], self.folder / "log")
        try:
            server.wait_ready()
            yield server
        finally:
            server.stop()

    def several(self):
        return self.server(*self.models, "--keep-alive", "10m")

    def cold(self, rounds):
        with self.several() as server:
            for _ in range(rounds):
                post(server.port, "/sleep?level=1")
                yield self.first_token(server.port), self.started_for_a_request()

    def started_for_a_request(self):
        """Returns the seconds from a start to the first token."""
        port = free_port()
        words = [self.options.binary, "serve", self.models[0], "--port", str(port), *self.arguments]
        begun = time.perf_counter()
        with process(words):
            while True:
                with contextlib.suppress(OSError):
                    if urllib.request.urlopen(f"http://127.0.0.1:{port}/ready").status == 200:
                        break
                time.sleep(0.001)
            self.first_token(port)
            return time.perf_counter() - begun

    def first_token(self, port):
        """Returns the seconds to the first token, on a new connection."""
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port)) as connection:
            seconds, _, _ = time_first_token(connection, PROMPT, 1, model=self.names[0], temperature=0)
        return seconds

    def one(self, rounds):
        with self.server(self.models[0], "--keep-alive", "10m") as unloadable, self.server(self.models[0]) as fixed:
            for _ in range(rounds):
                speeds = [self.load(server.port, self.names[0])["output_throughput"] for server in (unloadable, fixed)]
                yield tuple(speeds)

    def busy(self, rounds):
        with self.several() as server:
            for name in self.names:
                self.load(server.port, name)
            for _ in range(rounds):
                begun = time.perf_counter()
                for name in self.names:
                    self.load(server.port, name)
                in_turn = time.perf_counter() - begun
                loads = [threading.Thread(target=self.load, args=(server.port, name)) for name in self.names]
                begun = time.perf_counter()
                for load in loads:
                    load.start()
                for load in loads:
                    load.join()
                # Both sides answer the same requests, so that throughput is the inverse of time.
                yield 1 / (time.perf_counter() - begun), 1 / in_turn

    def load(self, port, model):
        """Returns the results of `corella bench serve`."""
        results = self.folder / f"{model}.json"
        words = ["bench", "serve", "--port", port, "--model", model, "--num-prompts", self.options.requests]
        words += ["--max-concurrency", 8, "--prompt-words", 32, "--max-tokens", 32, "--ignore-eos"]
        words += ["--output-json", results]
        done = subprocess.run([self.options.binary, *map(str, words)], capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stderr)
        return json.loads(results.read_text())

    def wake(self, rounds):
        with self.server(self.models[0]) as running:
            for _ in range(rounds):
                yield self.woken(), self.first_token(running.port)

    def woken(self):
        """Returns the seconds from a request on the socket to its first token, from a server that it starts."""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            seconds = []
            port = listener.getsockname()[1]
            client = threading.Thread(target=lambda: seconds.append(self.first_token(port)))
            client.start()
            select.select([listener], [], [])
            words = [self.options.binary, "serve", self.models[0], *self.arguments]
            with process(["sh", "-c", ACTIVATE, "sh", *words], stdin=listener):
                client.join()
        return seconds[0]


@contextlib.contextmanager
def process(words, stdin=subprocess.DEVNULL):
    started = subprocess.Popen(words, stdin=stdin, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        started.terminate()
        started.wait()


def post(port, path):
    urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", b"").read()


def spread(values, digits=3):
    """Returns the median, with the lowest and the highest value."""
    low, middle, high = (f"{value:.{digits}f}" for value in (min(values), statistics.median(values), max(values)))
    return f"{middle} ({low}-{high})"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("binary", type=os.path.abspath)
    parser.add_argument("model")
    parser.add_argument("other")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=64, help="of each load")
    parser.add_argument("--parts", default=",".join(PARTS), help="with commas between")
    given = sys.argv[1:]
    at = given.index("--") if "--" in given else len(given)
    options, arguments = parser.parse_args(given[:at]), given[at + 1 :]
    print(f"python {' '.join(sys.argv)}\n", flush=True)
    print("| | this | beside | ratio |\n|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(options, arguments, folder)
        for part in options.parts.split(","):
            pairs = list(getattr(bench, part)(options.rounds))
            this, beside = zip(*pairs)
            ratios = [one / other for one, other in pairs]
            print(f"| {part} | {spread(this)} | {spread(beside)} | {spread(ratios, 2)} |", flush=True)


main()
