"""Measures what the prefix cache saves a model with recurrent layers.

    python bench/hybrid_prefix.py target/release/corella MODEL [ROUNDS [OPTION…]]

MODEL is a folder of `bench/make_model.py`, such as lfm2-350m or small-qwen3.5; OPTIONs go to `corella serve`. Each
round has its own prefix of random tokens, and sends one request after the other:

* computed: the prefix and 64 tokens;
* another question: the same prefix and 64 other tokens;
* repeated: the first prompt again;
* next turn: the first prompt, its answer of 100 tokens, and 64 more;
* branch, three times: 64 tokens after another prefix, at whose end no regular snapshot lies.

Each time is that of a request that generates one token. The server's processor time is printed beside it, because other
programs disturb it less.
"""

import json
import os
import random
import re
import statistics
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

BINARY, MODEL = Path(sys.argv[1]), Path(sys.argv[2])
ROUNDS = int(sys.argv[3]) if len(sys.argv) > 3 else 5
OPTIONS = sys.argv[4:]
CACHED, NEW, ANSWER, BRANCH = 4096, 64, 100, 1500
TICKS = os.sysconf("SC_CLK_TCK")


class Server:
    def __init__(self):
        command = [BINARY, "serve", MODEL, "--port", "0", "--max-model-len", "8192", *OPTIONS]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        for line in self.process.stderr:
            if "snapshots" in line:
                print(line.strip(), file=sys.stderr)
            if line.startswith("ready") and (found := re.search(r"http://127\.0\.0\.1:(\d+)", line)):
                self.url = f"http://127.0.0.1:{found[1]}/v1/completions"
                return
        sys.exit("the server did not start")

    def processor_time(self):
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS

    def ask(self, prompt, max_tokens=1):
        """Returns seconds, processor seconds, cached tokens, and the answer's tokens."""
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        request = urllib.request.Request(self.url, json.dumps(body).encode(), {"content-type": "application/json"})
        processors, start = self.processor_time(), time.monotonic()
        with urllib.request.urlopen(request) as response:
            answer = json.load(response)
        seconds, processors = time.monotonic() - start, self.processor_time() - processors
        cached = answer["usage"].get("prompt_tokens_details", {}).get("cached_tokens", 0)
        return seconds, processors, cached, answer["choices"][0]["token_ids"]


def main():
    server = Server()
    rows = {}

    def ask(name, prompt):
        seconds, processors, cached, _ = server.ask(prompt)
        rows.setdefault(name, []).append((seconds, processors, cached, len(prompt)))
        print(f"{name}: {seconds:.3f} s, {processors:.2f} s of processors, {cached} cached", file=sys.stderr, flush=True)

    try:
        for index in range(ROUNDS):
            generator = random.Random(index)
            draw = lambda count: [generator.randrange(256, 8192) for _ in range(count)]  # noqa: E731
            server.ask(draw(NEW))
            prefix = draw(CACHED)
            first = prefix + draw(NEW)
            ask("computed", first)
            ask("another question", prefix + draw(NEW))
            ask("repeated", first)
            *_, answer = server.ask(first, ANSWER)
            ask("next turn", first + answer + draw(NEW))
            branch = draw(BRANCH)
            for name in ("branch, computed", "branch, seen again", "branch, third time"):
                ask(name, branch + draw(NEW))
    finally:
        server.process.terminate()
        server.process.wait()
    print("| | prompt | cached | s (lowest to highest) | of computed | processor time, s | of computed |\n|---|---|---|---|---|---|---|")
    base = None
    for name, found in rows.items():
        seconds, processors, cached, length = zip(*found)
        if name.endswith("computed"):
            base = (statistics.median(seconds), statistics.median(processors))
        median, used = statistics.median(seconds), statistics.median(processors)
        print(
            f"| {name} | {length[0]} | {statistics.median(cached):.0f} | {median:.3f} ({min(seconds):.3f} to {max(seconds):.3f}) "
            f"| {median / base[0]:.3f} | {used:.2f} | {used / base[1]:.3f} |"
        )


if __name__ == "__main__":
    main()
