#!/usr/bin/env python3
"""Serves from a GPU and checks it as a client: start, streams, a kill, a pair of nodes on one card.

    python3 bench/gpu_serving.py target/release/corella MODEL...

The answers of 64 streams at once are compared with each prompt's lone answer, and the pair's answers with one node's.
Needs only Python 3.10.
"""

import argparse
import concurrent.futures
import contextlib
import json
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request

DEVICE = "cuda"
NUM_STREAMS = 64
MAX_TOKENS = 64
START_TIMEOUT_S = 120


class Server:
    """A server on the GPU. If it ends early, its log is shown."""

    def __init__(self, binary, model, *arguments):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.log = tempfile.NamedTemporaryFile("w+")
        words = [binary, "serve", model, "--device", DEVICE, "--port", self.port, *arguments]
        self.begin = time.monotonic()
        self.process = subprocess.Popen(
            [str(word) for word in words], stdin=subprocess.DEVNULL, stdout=self.log, stderr=subprocess.STDOUT
        )
        while True:
            with contextlib.suppress(OSError), self.get("/ready") as response:
                if response.status == 200:
                    break
            if self.process.poll() is not None or time.monotonic() - self.begin > START_TIMEOUT_S:
                raise RuntimeError(f"the server is not ready:\n{self.text()}")
            time.sleep(0.01)
        self.ready_s = time.monotonic() - self.begin

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()

    def text(self):
        self.log.seek(0)
        return self.log.read()

    def get(self, path):
        return urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=60)

    def metric(self, name, label=""):
        """Returns the sum of a metric's samples with a label."""
        with self.get("/metrics") as response:
            lines = response.read().decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name} ", f"{name}{{")) and label in line)

    def stream(self, prompt):
        """Returns a greedy answer, the seconds to its first piece, and whether the answer was complete."""
        body = {"prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "stream": True, "ignore_eos": True}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        begin, first, pieces, ended = time.monotonic(), None, [], False
        with contextlib.suppress(OSError, ValueError), urllib.request.urlopen(request, timeout=60) as response:
            for line in response:
                if line.startswith(b"data: [DONE]"):
                    ended = True
                elif line.startswith(b"data: "):
                    first = first or time.monotonic() - begin
                    pieces.append(json.loads(line[6:])["choices"][0]["text"])
        return "".join(pieces), first, ended


def prompts():
    return [f"Story number {i}: once there was {'a very ' * (i % 9)}small engine" for i in range(NUM_STREAMS)]


def streams(server):
    """Returns the answers to all prompts at once, with their times."""
    with concurrent.futures.ThreadPoolExecutor(NUM_STREAMS) as pool:
        return list(pool.map(server.stream, prompts()))


def check(is_good, what):
    print(f"{'ok    ' if is_good else 'FAILED'} {what}", flush=True)
    return is_good


def one_node(binary, model):
    with Server(binary, model) as server:
        begin = time.monotonic()
        _, first, _ = server.stream("once")
        print(f"{model}: ready in {server.ready_s:.2f} s, first token {first or float('nan'):.3f} s behind that")
        lone = [server.stream(prompt) for prompt in prompts()]
        begin = time.monotonic()
        together = streams(server)
        seconds = time.monotonic() - begin
        print(f"{NUM_STREAMS} streams of {MAX_TOKENS} tokens: {NUM_STREAMS * MAX_TOKENS / seconds:.0f} tokens/s,", end=" ")
        print(f"first piece {1e3 * statistics.median(first or 99 for _, first, _ in together):.1f} ms (median)")
        good = check(all(ended for _, _, ended in lone + together), "all streams came to their end")
        equal = sum(a[0] == b[0] for a, b in zip(lone, together, strict=True))
        good &= check(equal == NUM_STREAMS, f"{equal} of {NUM_STREAMS} streams have their lone answer")
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            cut = pool.submit(server.stream, prompts()[0])
            time.sleep(0.02)
            server.process.send_signal(signal.SIGKILL)
            server.process.wait()
            cut.result()
    return good, [text for text, _, _ in lone]


def pair(binary, model, lone, transport):
    """Compares a prefill and a decode node on one GPU with one node's answers."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = ("--registry", f"file:{folder}", "--transport", transport, "--gpu-memory-utilization", 0.3)
        arguments += ("--decode-search-timeout", 60_000)
        # The second node sees the memory that the first node has left free.
        with Server(binary, model, "--role", "decode", *arguments) as decode:
            with Server(binary, model, "--role", "prefill", *arguments) as prefill:
                deadline = time.monotonic() + 30
                while prefill.metric("corella_decode_nodes", 'standing="healthy"') < 1 and time.monotonic() < deadline:
                    time.sleep(0.05)
                together = streams(prefill)
                equal = sum(a == b for a, (b, _, _) in zip(lone, together, strict=True))
                good = check(equal == NUM_STREAMS, f"{transport}: {equal} of {NUM_STREAMS} answers of the pair are equal")
                num_remote = prefill.metric("corella_remote_tokens_total")
                good &= check(num_remote > 0, f"{transport}: {num_remote:.0f} tokens came from the decode node")
                if not good:
                    print(prefill.text()[-3000:], decode.text()[-3000:], sep="\n")
    return good


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary")
    parser.add_argument("models", nargs="+", metavar="MODEL")
    arguments = parser.parse_args()
    good = True
    for model in arguments.models:
        try:
            is_good, lone = one_node(arguments.binary, model)
            good &= is_good
            # A second server finds its kernels cached, and a card that a killed process has left.
            with Server(arguments.binary, model) as server:
                text, _, ended = server.stream(prompts()[0])
                good &= check(ended and text == lone[0], f"after kill -9: ready in {server.ready_s:.2f} s, the same answer")
            for transport in ("shm", "tcp"):
                good &= pair(arguments.binary, model, lone, transport)
        except (RuntimeError, OSError) as error:
            good = check(False, f"{model}: {error}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
