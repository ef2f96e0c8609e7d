"""Serves three models with room for two, while their files are replaced, removed and cut off, and finds what is lost.

    CORELLA_BIN=target/release/corella python tests/client/model_soak.py --seconds 600 --ends 40

16 clients name the models in random order. Every answer must be that of a server with this model alone. Only requests
for the model whose files go may fail, with an error that says so. The planned memory stays within its bound, and memory
is given back when all models are unloaded. Then servers get SIGTERM at a random moment, and must end as with one model.
"""

import argparse
import collections
import contextlib
import http.client
import json
import os
import random
import re
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path

import golden_model
from patience import PATIENCE_S, wait_until
from server_process import ROOT, ServerProcess

NUM_CLIENTS = 16
NUM_PROMPTS = 24
SMALL = ("--threads", 1, "--device", "cpu", "--kv-cache-memory", "8M")
# Each model is planned with 58 or 72 MiB, most of it for activations, the tokenizer and the disk.
ROOM_BYTES = 150 << 20
# The model whose files go. Those of the others are only replaced. Each of its steps reads the mapped embedding.
VICTIM = "hare"
# The pause between two changes of files.
CHANGE_INTERVAL_S = 0.5
# Of this many changes, one breaks the victim, and a later one mends it. It is tried again after 30 seconds, so that all
# models take turns for about half of the time.
CYCLE, BREAK_AT, MEND_AT = 128, 8, 24
# Memory that may be left when all models are unloaded.
MAX_LEFT_BYTES, MAX_LEFT_SHARE = 8 << 20, 0.02


def make_models(folder):
    fox = shutil.copytree(ROOT / "models/nano", folder / "fox")
    return [fox, golden_model.make("gemma3", folder / "owl"), golden_model.make("llama-mha-untied", folder / VICTIM)]


def ask(port, model, number, is_stream=False):
    """Returns a text and None, or None and the error."""
    prompt = [3 + (5 * number + 7 * at) % 50 for at in range(16 + 3 * number)]
    fields = {"model": model, "prompt": prompt, "max_tokens": 1 + number % 20, "temperature": 0, "ignore_eos": True}
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)) as connection:
        connection.request("POST", "/v1/completions", json.dumps(fields | {"stream": is_stream}))
        response = connection.getresponse()
        body = response.read().decode()
    if response.status != 200:
        return None, json.loads(body)["error"]
    if not is_stream:
        return json.loads(body)["choices"][0]["text"], None
    lines = [line.removeprefix("data: ") for line in body.splitlines() if line.startswith("data: ")]
    assert lines, body
    events = [json.loads(line) for line in lines if line != "[DONE]"]
    for event in events:
        if "error" in event:
            return None, event["error"]
    assert lines[-1] == "[DONE]", body
    return "".join(event["choices"][0]["text"] for event in events), None


def answers_of(model):
    """Returns the answers of a server with this model alone."""
    with ServerProcess(model, *SMALL) as server:
        answers = [ask(server.port, model.name, number) for number in range(NUM_PROMPTS)]
    assert all(error is None for _, error in answers), answers
    return [text for text, _ in answers]


def anonymous_bytes(server):
    rollup = Path(f"/proc/{server.process.pid}/smaps_rollup").read_text()
    sizes = {name: 1024 * int(kib) for name, kib in re.findall(r"(\w+): +(\d+) kB", rollup)}
    return sizes["Anonymous"], sizes["Rss"] - sizes["Anonymous"]


def load(server, models):
    for model in models:
        ask(server.port, model.name, 0)


def unload(server):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
    with contextlib.closing(connection):
        connection.request("POST", "/sleep?level=1", b"")
        response = connection.getresponse()
        assert response.status == 200, response.read()


def planned_bytes(log):
    """Returns the most memory that loaded models were planned with, and the number of loads."""
    planned, most, num_loads = {}, 0, 0
    for line in log.splitlines():
        if begun := re.search(r" loading (\w+): ([\d.]+) MiB", line):
            planned[begun[1]] = float(begun[2]) * (1 << 20)
            num_loads += 1
        elif ended := re.search(r" unloading (\w+): | (\w+) cannot be loaded", line):
            # A model that has been planned in vain has no memory.
            planned.pop(ended[1] or ended[2], None)
        most = max(most, sum(planned.values()))
    return most, num_loads


class Files:
    """Changes the models' files as an operator does, and as an accident does."""

    def __init__(self, models, seed):
        self.models, self.numbers = models, random.Random(seed)
        self.victim = next(model for model in models if model.name == VICTIM)
        self.counts = collections.Counter()
        self.spare = {model: {path.name: path.read_bytes() for path in model.iterdir()} for model in models}

    def change(self):
        at = self.counts.total() % CYCLE
        if at == BREAK_AT:
            self.numbers.choice([self.remove, self.cut])()
        elif at == MEND_AT:
            self.replace(self.victim)
        else:
            is_broken = BREAK_AT < at < MEND_AT
            self.replace(self.numbers.choice([model for model in self.models if not is_broken or model != self.victim]))

    def replace(self, model):
        """Replaces each file by one with the same content, which leaves a model whole at any time."""
        model.mkdir(exist_ok=True)
        for name, content in self.spare[model].items():
            new = model.parent / f"{model.name}.new"
            new.write_bytes(content)
            os.replace(new, model / name)
        self.counts["replaced"] += 1

    def remove(self):
        shutil.rmtree(self.victim, ignore_errors=True)
        self.counts["removed"] += 1

    def cut(self):
        with contextlib.suppress(FileNotFoundError):
            os.truncate(self.victim / "model.safetensors", 4096)
            self.counts["cut off"] += 1


class ModelSoak:
    def __init__(self, folder, seed=1):
        self.seed = seed
        self.models = make_models(folder)
        self.expected = {model.name: answers_of(model) for model in self.models}
        self.arguments = (*self.models, *SMALL, "--model-memory", ROOM_BYTES, "--kv-disk", f"{folder / 'kv'},64M")
        self.counts, self.wrong, self.errors = collections.Counter(), [], collections.Counter()
        self.lock = threading.Lock()

    def run(self, seconds, num_changes):
        """Runs for at least this long, and until files were changed so often. Returns lines for a reader."""
        files = Files(self.models, self.seed)
        with ServerProcess(*self.arguments) as server:
            # The server's own threads have begun after this.
            load(server, self.models)
            unload(server)
            before, _ = anonymous_bytes(server)
            most = 0
            is_over = threading.Event()
            clients = self._start_clients(server, is_over, may_fail={VICTIM})
            # A model may break before a slow machine has answered its first request.
            names = self.expected.keys()
            wait_until(
                lambda: self.wrong or all(self.counts[f"{name} answered"] > 0 for name in names), "all models answer"
            )
            ends_at = time.monotonic() + seconds
            while time.monotonic() < ends_at or files.counts.total() < num_changes:
                is_over.wait(CHANGE_INTERVAL_S)
                files.change()
                most = max(most, anonymous_bytes(server)[0])
            files.replace(files.victim)
            is_over.set()
            for client in clients:
                client.join()
            self._check_recovery(server)
            self._check_cut(server, files)
            unload(server)
            allowed = before + max(MAX_LEFT_BYTES, MAX_LEFT_SHARE * before)
            left, file_backed = anonymous_bytes(server)
            try:
                # Threads without work end after some seconds.
                wait_until(lambda: anonymous_bytes(server)[0] <= allowed, "memory is given back")
            except AssertionError:
                self.wrong.append(f"{left / 1e6:.1f} MB are left of {before / 1e6:.1f} MB")
            left, file_backed = anonymous_bytes(server)
            planned, num_loads = planned_bytes(server.log())
            if planned > ROOM_BYTES:
                self.wrong.append(f"{planned / 1e6:.1f} MB were planned, with room for {ROOM_BYTES / 1e6:.1f} MB")
            if most > before + ROOM_BYTES:
                self.wrong.append(f"{most / 1e6:.1f} MB were taken, with room for {ROOM_BYTES / 1e6:.1f} MB")
            server.terminate()
            if (code := server.wait()) != 0:
                self.wrong.append(f"the server ended with {code}")
            if self.wrong:
                print(server.log(), file=sys.stderr)
        return [
            f"requests: {dict(self.counts)}; files: {dict(files.counts)}; {num_loads} loads",
            f"planned: {planned / 1e6:.1f} MB at most, of {ROOM_BYTES / 1e6:.1f} MB",
            f"anonymous: {before / 1e6:.1f} MB at the start, {most / 1e6:.1f} MB at most, {left / 1e6:.1f} MB at the end",
            f"file-backed at the end: {file_backed / 1e6:.1f} MB",
            *(f"{number} x {error}" for error, number in self.errors.most_common()),
        ]

    def end(self, number):
        """Sends SIGTERM to a server at a random moment."""
        numbers = random.Random(f"{self.seed} {number}")
        with ServerProcess(*self.arguments) as server:
            is_over = threading.Event()
            clients = self._start_clients(server, is_over, may_fail={model.name for model in self.models})
            is_over.wait(3 * numbers.random())
            server.terminate()
            code = server.wait()
            is_over.set()
            for client in clients:
                client.join()
            if code != 0:
                self.wrong.append(f"the server ended with {code} after SIGTERM")
                print(server.log(), file=sys.stderr)

    def _start_clients(self, server, is_over, may_fail):
        def play(seed):
            numbers = random.Random(f"{self.seed} {seed}")
            while not is_over.is_set():
                name = numbers.choice([model.name for model in self.models])
                try:
                    self._ask(server, name, numbers, may_fail)
                except (OSError, http.client.HTTPException) as error:
                    # A server that has ended takes no connection.
                    with self.lock:
                        if len(may_fail) < len(self.models):
                            self.wrong.append(f"{name}: {error!r}")
                        self.counts["refused"] += 1
                    return
                except Exception as error:
                    with self.lock:
                        self.wrong.append(f"{name}: {error!r}")
                    return

        clients = [threading.Thread(target=play, args=(seed,)) for seed in range(NUM_CLIENTS)]
        for client in clients:
            client.start()
        return clients

    def _ask(self, server, name, numbers, may_fail):
        number = numbers.randrange(NUM_PROMPTS)
        text, error = ask(server.port, name, number, is_stream=numbers.random() < 0.5)
        with self.lock:
            if error is None:
                self.counts[f"{name} answered"] += 1
                if text != self.expected[name][number]:
                    self.wrong.append(f"{name}, prompt {number}: {text!r} is not {self.expected[name][number]!r}")
                return
            self.counts[f"{name} failed"] += 1
            self.errors[f"{error.get('code')}: {error['message']}"] += 1
            if name not in may_fail or not says_why(error):
                self.wrong.append(f"{name}: {error}")

    def _check_recovery(self, server):
        """A model whose files are back answers again. It is tried again after 30 seconds."""
        # The victim is the last, and so stays loaded.
        for name, answers in sorted(self.expected.items(), key=lambda item: item[0] == VICTIM):
            wait_until(lambda: ask(server.port, name, 0) == (answers[0], None), f"{name} answers again")


    def _check_cut(self, server, files):
        """A file that is cut off while it is mapped ends requests of its model, and of no other."""
        # The last check has loaded the model.
        files.cut()
        _, error = ask(server.port, VICTIM, 1)
        if error is None or "shorter" not in error["message"]:
            self.wrong.append(f"a file was cut off, but its model says: {error}")
        for name in self.expected.keys() - {VICTIM}:
            if ask(server.port, name, 1) != (self.expected[name][1], None):
                self.wrong.append(f"{name} does not answer after the cut of another model")
        files.replace(files.victim)


def says_why(error):
    """Whether an error says that its model is gone, or that the server ends."""
    text = error["message"].lower()
    is_gone = any(word in text for word in ("shorter", "no such f", "is missing", "truncated"))
    return error.get("code") == "draining" or is_gone


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--ends", type=int, default=40, help="the number of servers that get SIGTERM")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        soak = ModelSoak(Path(folder), options.seed)
        print("\n".join(soak.run(options.seconds, num_changes=20)), flush=True)
        for number in range(options.ends):
            soak.end(number)
        print(f"{options.ends} servers ended by SIGTERM; requests: {dict(soak.counts)}")
    if soak.wrong:
        sys.exit("\n".join([f"{len(soak.wrong)} faults", *dict.fromkeys(soak.wrong[:20])]))


if __name__ == "__main__":
    main()
