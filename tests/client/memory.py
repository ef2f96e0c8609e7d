"""Sends mixed traffic for a long time, and measures a process's growth by the number of requests.

    CORELLA_BIN=target/release/corella python tests/client/memory.py --seconds 3600 --json memory.json

The program measures one node, and a pair. Clients pause now and then, because threads that end when idle and come back
may contribute to growth; `--pause 0` lets them send all the time. After a warm-up, a line is fitted to the memory of
each process; the program fails if a process grows by more than 1 MB over 10,000 requests. `--kinds chat,left` sends
only some kinds of requests. With a script for CORELLA_BIN that starts the server under heaptrack, `heaptrack_print
--print-peaks 1` names the growing allocations.
"""

import argparse
import contextlib
import http.client
import json
import os
import random
import string
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

from fleet import Fleet
from patience import PATIENCE_S, wait_until
from server_process import ServerProcess
from test_tools import CONVERSATION, make_folder

NUM_CLIENTS = 4
SAMPLE_INTERVAL_S = 1.0
# Clients send for this long at a time.
BURST_S = 12
# The allowed growth of a process over 10,000 requests.
MAX_GROWTH = 1e6
# The first part of a run fills caches and stores, which have limits, and is not measured.
WARM_UP = 0.4
NUM_BATCH_LINES = 20
# Different lists of tools, because the server keeps the tokens of recurring long texts, up to 32 MB.
NUM_TOOLS = 100
# Every limit is small, so that it is reached at the end of the warm-up.
LIMITS = ("--kv-cache-memory", "4M", "--max-stored-response-bytes", "1M", "--max-num-seqs", 32)

# A model of a few kilobytes whose template reads tools: the server's own memory dominates.
TEMPLATE = CONVERSATION.replace("CALL", "<tool_call>")

WORDS = ["fox", "lantern", "river", "tea", "story", "night", "market", "stone", "letter", "boat", "garden", "winter"]


class Client:
    """Sends requests of all kinds, one after another, over one connection."""

    def __init__(self, server, kinds, seed):
        self.server, self.kinds = server, kinds
        self.numbers = random.Random(seed)
        self.counts = Counter()
        self.wrong = []
        self.response_id = None
        self.connection = None

    def run_until(self, is_over, may_send):
        """Sends requests while `may_send` is set, including at the end."""
        while may_send.wait() and not is_over.is_set():
            (kind,) = self.numbers.choices(self.kinds, [WEIGHTS.get(kind, 1) for kind in self.kinds])
            self.counts[kind] += NUM_BATCH_LINES if kind == "batch" else 1
            try:
                KINDS[kind](self)
            # Patience ends with an AssertionError.
            except (AssertionError, OSError, ValueError, KeyError, http.client.HTTPException) as error:
                self.wrong.append(f"{kind}: {error!r}")
                self.close()
        self.close()

    def close(self):
        if self.connection is not None:
            self.connection.close()
            self.connection = None

    def text(self, most=40):
        return " ".join(self.numbers.choices(WORDS, k=self.numbers.randrange(1, most)))

    def name(self):
        return "".join(self.numbers.choices(string.ascii_lowercase, k=8))

    def num_tokens(self):
        return self.numbers.randrange(1, 24)

    def messages(self):
        return [{"role": "user", "content": self.text()}]

    def send(self, method, path, body=None, headers=None):
        if self.connection is None:
            self.connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=PATIENCE_S)
        if isinstance(body, dict):
            body = json.dumps(body)
        self.connection.request(method, path, body, {"content-type": "application/json"} | (headers or {}))
        return self.connection.getresponse()

    def ask(self, method, path, body=None, headers=None, status=200):
        response = self.send(method, path, body, headers)
        answer = response.read()
        if response.status != status:
            raise ValueError(f"{method} {path} is answered {response.status}: {answer[:300]}")
        return answer

    def post(self, path, fields, **options):
        return self.ask("POST", path, {"model": self.server.model()} | fields, **options)

    def chat(self, **fields):
        common = {"messages": self.messages(), "max_tokens": self.num_tokens(), "temperature": 1}
        return self.post("/v1/chat/completions", common | fields)

    def schema(self):
        properties = {self.name(): {"type": "string", "maxLength": self.numbers.randrange(1, 9)} for _ in range(3)}
        return {
            "type": "object",
            "properties": properties,
            "required": list(properties),
            "additionalProperties": False,
        }

    def send_chat(self):
        self.chat(stream=self.numbers.random() < 0.5)

    def send_and_leave(self):
        fields = {"model": self.server.model(), "prompt": self.text(), "max_tokens": 200, "stream": True}
        response = self.send("POST", "/v1/completions", fields | {"ignore_eos": True})
        for _ in range(self.numbers.randrange(6)):
            response.readline()
        response.close()
        self.close()

    def send_choices(self):
        fields = {"prompt": self.text(), "n": 3, "logprobs": 3, "max_tokens": self.num_tokens()}
        self.post("/v1/completions", fields | {"stop": [" the", self.name()], "presence_penalty": 0.5})

    def send_schema(self):
        schema = {"name": "answer", "schema": self.schema()}
        self.chat(response_format={"type": "json_schema", "json_schema": schema})

    def send_tools(self):
        own, self.numbers = self.numbers, random.Random(self.numbers.randrange(NUM_TOOLS))
        function = {"name": self.name(), "parameters": self.schema()}
        self.numbers = own
        choice = self.numbers.choice(["auto", "required"])
        self.chat(tools=[{"type": "function", "function": function}], tool_choice=choice, max_tokens=40)

    def send_embeddings(self):
        self.post("/v1/embeddings", {"input": [self.text() for _ in range(4)]})

    def send_response(self):
        fields = {"input": self.text(), "max_output_tokens": 16, "stream": False}
        if self.response_id and self.numbers.random() < 0.6:
            fields["previous_response_id"] = self.response_id
        answer = json.loads(self.post("/v1/responses", fields))
        # A conversation ends before it exceeds the context.
        self.response_id = answer["id"] if self.numbers.random() < 0.8 else None

    def send_message(self):
        fields = {"messages": self.messages(), "max_tokens": self.num_tokens()}
        self.post("/v1/messages", fields, headers={"anthropic-version": "2023-06-01"})

    def send_ollama(self):
        self.post("/api/chat", {"messages": self.messages(), "options": {"num_predict": self.num_tokens()}})

    def send_wrong(self):
        """Sends a request that must be refused, under a name that no other request has."""
        path = f"/v1/{self.name()}"
        fields = {"model": self.name(), "messages": self.messages()}
        self.numbers.choice(
            [
                lambda: self.ask("GET", path, status=404),
                lambda: self.ask("POST", "/v1/chat/completions", fields, status=404),
                lambda: self.ask("POST", "/v1/chat/completions", '{"' + self.name(), status=400),
                lambda: self.post("/v1/completions", {"prompt": "a", self.name(): 1}, status=400),
            ]
        )()

    def send_look(self):
        self.ask("GET", self.numbers.choice(["/metrics", "/v1/models", "/health", "/ready"]))

    def send_batch(self):
        body = {"max_tokens": 4, "prompt": self.text()}
        lines = [
            {"custom_id": str(at), "method": "POST", "url": "/v1/completions", "body": body}
            for at in range(NUM_BATCH_LINES)
        ]
        mark = self.name()
        parts = [("purpose", "", "batch"), ("file", '; filename="in.jsonl"', "\n".join(map(json.dumps, lines)))]
        form = "".join(
            f'--{mark}\r\ncontent-disposition: form-data; name="{name}"{more}\r\n\r\n{text}\r\n'
            for name, more, text in parts
        )
        headers = {"content-type": f"multipart/form-data; boundary={mark}"}
        file = json.loads(self.ask("POST", "/v1/files", form + f"--{mark}--\r\n", headers))
        fields = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        batch = json.loads(self.ask("POST", "/v1/batches", fields))

        def end():
            now = json.loads(self.ask("GET", f"/v1/batches/{batch['id']}"))
            return now if now["status"] in ("completed", "failed") else None

        done = wait_until(end, "the batch ends")
        for file_id in (file["id"], done["output_file_id"]):
            self.ask("DELETE", f"/v1/files/{file_id}")


KINDS = {
    "chat": Client.send_chat,
    "left": Client.send_and_leave,
    "choices": Client.send_choices,
    "schema": Client.send_schema,
    "tools": Client.send_tools,
    "embeddings": Client.send_embeddings,
    "response": Client.send_response,
    "message": Client.send_message,
    "ollama": Client.send_ollama,
    "wrong": Client.send_wrong,
    "look": Client.send_look,
    "batch": Client.send_batch,
}


# The records of 10,000 batches are kept, with 1.7 KB each.
WEIGHTS = {"batch": 0.1}


class Process:
    """A process and its memory over time."""

    def __init__(self, name, server):
        self.name, self.server = name, server
        self.samples = []

    def sample(self, at_s, num_requests):
        process = Path("/proc") / str(self.server.process.pid)
        status = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
        size = {name: 1024 * int(status[name].split()[0]) for name in ("VmRSS", "RssAnon", "RssFile", "RssShmem")}
        holds = {"threads": int(status["Threads"]), "files": len(os.listdir(process / "fd"))}
        self.samples.append({"at_s": at_s, "num_requests": num_requests} | size | holds)

    def growth(self, name="VmRSS"):
        """Returns the growth in bytes over 10,000 requests, by least squares."""
        end_s = self.samples[-1]["at_s"]
        settled = [sample for sample in self.samples if sample["at_s"] >= WARM_UP * end_s]
        x = [sample["num_requests"] for sample in settled]
        y = [sample[name] for sample in settled]
        mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
        variance = sum((at - mean_x) ** 2 for at in x)
        return 1e4 * sum((at - mean_x) * (size - mean_y) for at, size in zip(x, y)) / max(variance, 1)

    def report(self, num_points=8):
        rows = self.samples[:: max(1, len(self.samples) // num_points)] + self.samples[-1:]
        curve = ", ".join(f"{sample['num_requests']}: {sample['VmRSS'] / 1e6:.1f}" for sample in rows)
        parts = ", ".join(f"{name} {self.growth(name) / 1e6:+.3f}" for name in ("RssAnon", "RssFile", "RssShmem"))
        return (
            f"{self.name}: {self.growth() / 1e6:+.3f} MB over 10,000 requests ({parts})\n"
            f"  MB by number of requests: {curve}"
        )


def play(processes, kinds, seconds, pause_s):
    """Sends requests to the first of the processes in bursts; returns the number of requests by kind, and the
    errors."""
    server = processes[0].server
    server.model()
    began_at = time.monotonic()
    clients = [Client(server, kinds, seed) for seed in range(NUM_CLIENTS)]
    is_over, may_send = threading.Event(), threading.Event()
    threads = [threading.Thread(target=client.run_until, args=(is_over, may_send)) for client in clients]
    for thread in threads:
        thread.start()
    num_samples = int(BURST_S / SAMPLE_INTERVAL_S)
    num_pauses = int(pause_s / SAMPLE_INTERVAL_S)
    for number in range(int(seconds / SAMPLE_INTERVAL_S)):
        if number % (num_samples + num_pauses) < num_samples:
            may_send.set()
        else:
            may_send.clear()
        is_over.wait(SAMPLE_INTERVAL_S)
        at_s = time.monotonic() - began_at
        num_requests = sum(client.counts.total() for client in clients)
        for process in processes:
            process.sample(at_s, num_requests)
    is_over.set()
    may_send.set()
    for thread in threads:
        thread.join()
    wrong = [line for client in clients for line in client.wrong]
    return sum((client.counts for client in clients), Counter()), wrong


@contextlib.contextmanager
def one_node(*arguments):
    with tempfile.TemporaryDirectory() as files, ServerProcess("--files-dir", files, *arguments) as server:
        yield [Process("one node", server)]


@contextlib.contextmanager
def pair(*arguments):
    with tempfile.TemporaryDirectory() as files, Fleet() as fleet:
        decode = fleet.decode(*arguments)
        prefill = fleet.prefill("--files-dir", files, *arguments)
        yield [Process("prefill node", prefill), Process("decode node", decode)]


SETUPS = {"one": one_node, "pair": pair}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    seconds = float(os.environ.get("CORELLA_SOAK_SECONDS", 3600))
    parser.add_argument("--seconds", type=float, default=seconds, help="of each setup")
    # The server's idle threads end after ten seconds.
    parser.add_argument("--pause", type=float, default=12, help="seconds without requests behind each burst")
    parser.add_argument("--setups", default=",".join(SETUPS))
    parser.add_argument("--kinds", default=",".join(KINDS), help="of requests, with commas between")
    parser.add_argument("--device", default="cpu", choices=["mock", "cpu"])
    parser.add_argument("--json", type=Path, help="write all samples here")
    options = parser.parse_args()
    kinds, failures, samples = options.kinds.split(","), [], {}
    for setup in options.setups.split(","):
        arguments = ("--device", options.device, "--threads", 1, *LIMITS)
        with tempfile.TemporaryDirectory() as folder, SETUPS[setup](
            make_folder(Path(folder) / "model", TEMPLATE), *arguments
        ) as processes:
            counts, wrong = play(processes, kinds, options.seconds, options.pause)
            print(f"{setup}: {counts.total()} requests, {dict(counts)}, {len(wrong)} failed", flush=True)
            failures += [*dict.fromkeys(wrong)][:10]
            for process in processes:
                print(process.report(), flush=True)
                samples[f"{setup} {process.name}"] = process.samples
                if process.growth() > MAX_GROWTH:
                    failures.append(f"{process.name} grows by {process.growth() / 1e6:.2f} MB over 10,000 requests")
    if options.json:
        options.json.write_text(json.dumps(samples))
    if failures:
        sys.exit("\n".join(failures))


if __name__ == "__main__":
    main()
