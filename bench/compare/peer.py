"""The interface of an engine in the comparison, and code that the engines share."""

import contextlib
import inspect
import json
import os
import random
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

THREADS = 2
PREFILLS = (512, 2048)
BATCHES = (1, 8, 32)
CONTEXT = int(os.environ.get("COMPARE_CONTEXT", 128))  # number of tokens before the measured decode
DECODED = int(os.environ.get("COMPARE_DECODED", 32))
START_LIMIT_S = 600


class Missing(Exception):
    """The peer is not installed; the message names the missing part."""


def need(path, what):
    if not path or not Path(path).exists():
        raise Missing(f"no {what}" + (f" at {path}" if path else ""))
    return str(path)


class Peer:
    """One engine with one format of weights."""

    name = ""
    environment = {}

    def check(self):
        """Raises Missing if the peer cannot be measured."""

    def version(self):
        """Returns the measured version."""
        return ""

    def offline(self, prefills, batches):
        """Returns tokens/s, as {"prefill 512": …, "decode b8": …}, for the measurements that the peer supports."""
        return {}

    def serve_command(self, port):
        """Returns the command that starts a server; raises Missing if the peer has none."""
        raise Missing("its packages have no server for the OpenAI API")

    @contextlib.contextmanager
    def serving(self):
        with Server(self) as server:
            yield server

    def close(self):
        """Ends processes kept between runs."""

    def run(self, command):
        """Runs a command that must succeed, and returns its standard output."""
        done = subprocess.run(
            [str(part) for part in command], capture_output=True, text=True, env=os.environ | self.environment
        )
        if done.returncode:
            raise RuntimeError(f"{self.name}: {command[0]} ended with {done.returncode}\n{done.stderr[-2000:]}")
        return done.stdout


class ScriptPeer(Peer):
    """An engine in its own Python, which runs the peer's file as a script that prints JSON."""

    python = model = None

    def offline(self, prefills, batches):
        asked = json.dumps([prefills, batches])
        rows = self.run([self.python, inspect.getfile(type(self)), self.model, asked]).splitlines()
        # Libraries also write to standard output, some of them after the result.
        return json.loads([row for row in rows if row.startswith("{")][-1])


def print_speeds(prefills, batches, seconds):
    """Prints the speeds of a script. `seconds(length, batch, num_decoded)` returns the time until all prompts have
    their first token, and the time from there to the end."""
    speeds = {}
    seconds(CONTEXT, 1, 1)
    for length in prefills:
        seconds(length, 1, 0)
        speeds[f"prefill {length}"] = length / seconds(length, 1, 0)[0]
    for batch in batches:
        speeds[f"decode b{batch}"] = batch * DECODED / seconds(CONTEXT, batch, DECODED)[1]
    print(json.dumps(speeds))


def prompt(num_tokens, seed):
    """Returns random token ids that every model of the comparison has."""
    return random.Random(seed).choices(range(1000), k=num_tokens)


class Server:
    """A running server; `started_s` is the time from its start to its first token."""

    def __init__(self, peer):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        command = [str(part) for part in peer.serve_command(port)]
        self.log = tempfile.TemporaryFile("w+")
        began = time.monotonic()
        self.process = subprocess.Popen(
            command, stdout=self.log, stderr=self.log, env=os.environ | peer.environment, start_new_session=True
        )
        try:
            self.model = self.wait(began)
        except BaseException:
            self.stop()
            raise
        self.started_s = time.monotonic() - began

    def wait(self, began):
        while True:
            try:
                with urllib.request.urlopen(self.url + "/v1/models", timeout=30) as answer:
                    model = json.load(answer)["data"][0]["id"]
                body = {"model": model, "prompt": prompt(16, "start"), "max_tokens": 1, "temperature": 0}
                request = urllib.request.Request(
                    self.url + "/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
                )
                urllib.request.urlopen(request, timeout=300).read()
                return model
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                if self.process.poll() is not None or time.monotonic() - began > START_LIMIT_S:
                    self.log.seek(0)
                    raise RuntimeError(f"the server did not start:\n{self.log.read()[-2000:]}") from None
                time.sleep(0.01)

    def peak_rss_gb(self):
        """Returns the peak memory of all processes of the server. Pages shared by two processes count twice."""
        peak_kb = 0
        for status in Path("/proc").glob("[0-9]*/status"):
            try:
                if os.getsid(int(status.parent.name)) != self.process.pid:
                    continue
                lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
                peak_kb += int(lines.get("VmHWM", "0 kB").split()[0])
            except (ProcessLookupError, FileNotFoundError):
                pass
        return peak_kb / 1e6

    def stop(self):
        for end in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.process.pid, end)
                self.process.wait(30)
                break
            except subprocess.TimeoutExpired:
                pass
            except ProcessLookupError:
                break
        try:
            # The first process may have left other processes running.
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()
