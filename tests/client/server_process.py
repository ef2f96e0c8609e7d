"""Starts, watches and stops the built binary as a server."""

import contextlib
import os
import re
import signal
import socket
import ssl
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import openai

ROOT = Path(__file__).resolve().parents[2]
BINARY = Path(os.environ.get("CORELLA_BIN", ROOT / "target/release/corella"))
READY_TIMEOUT_S = 30.0


class ServerProcess:
    def __init__(self, *arguments, port=None, authority=None):
        """Starts a server. It speaks HTTPS if there is an authority, whose certificate it has."""
        self.port = port or free_port()
        scheme = "https" if authority else "http"
        self.base_url = f"{scheme}://127.0.0.1:{self.port}"
        self.context = ssl.create_default_context(cafile=authority) if authority else None
        self._model = None
        self._log = tempfile.TemporaryFile("w+")
        self.started_at = time.monotonic()
        self.process = subprocess.Popen(
            [BINARY, "serve", *map(str, arguments), "--port", str(self.port)],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        self.ready_s = self._wait_ready()
        self.client = openai.OpenAI(
            base_url=self.base_url + "/v1",
            api_key="unused",
            max_retries=0,
            timeout=300,
            http_client=openai.DefaultHttpxClient(verify=self.context) if self.context else None,
        )

    def _wait_ready(self):
        deadline = self.started_at + READY_TIMEOUT_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise AssertionError(f"exited with {self.process.returncode}:\n{self.log()}")
            if self.status_of("/ready") == 200:
                return time.monotonic() - self.started_at
            time.sleep(0.005)
        self.kill()
        raise AssertionError(f"not ready after {READY_TIMEOUT_S} s:\n{self.log()}")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()
        self.client.close()

    def log(self):
        self._log.seek(0)
        return self._log.read()

    def model(self):
        if self._model is None:
            self._model = self.client.models.list().data[0].id
        return self._model

    def status_of(self, path):
        """Returns the HTTP status, or None if nobody answers."""
        try:
            with urllib.request.urlopen(self.base_url + path, timeout=5, context=self.context) as response:
                return response.status
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return None

    def metric(self, name, **labels):
        """Returns the sum of the samples that have these labels."""
        with urllib.request.urlopen(self.base_url + "/metrics", timeout=30, context=self.context) as response:
            text = response.read().decode()
        total, names = 0.0, set()
        for line in text.splitlines():
            sample = re.fullmatch(r"([\w:]+)(?:\{(.*)\})? (\S+)", line)
            if sample is None:
                continue
            names.add(sample[1])
            if sample[1] != name:
                continue
            sample_labels = dict(re.findall(r'(\w+)="([^"]*)"', sample[2] or ""))
            if labels.items() <= sample_labels.items():
                total += float(sample[3])
        # A labelled counter has no sample before its first count.
        assert name in names or labels, f"/metrics has no {name}"
        return total

    def wait_until(self, condition, what, timeout_s=30.0):
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"never happened: {what}\n{self.log()}"
            time.sleep(0.01)

    def terminate(self):
        self.process.send_signal(signal.SIGTERM)

    def wait(self, timeout_s=30.0):
        return self.process.wait(timeout_s)

    def kill(self):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(30.0)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def slowed(server):
    """Lets a server run for a tenth of the time, so that a busy machine sees it work however fast it is."""
    is_over = threading.Event()

    def hold():
        while not is_over.wait(0.01):
            server.process.send_signal(signal.SIGSTOP)
            is_over.wait(0.09)
            server.process.send_signal(signal.SIGCONT)

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
