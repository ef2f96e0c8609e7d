"""Starts, watches and stops the built binary as a server."""

import contextlib
import os
import re
import signal
import socket
import ssl
import subprocess
import tempfile
import urllib.error
import urllib.request
from pathlib import Path

import openai
from patience import PATIENCE_S, held, wait_until

ROOT = Path(__file__).resolve().parents[2]
BINARY = Path(os.environ.get("CORELLA_BIN", ROOT / "target/release/corella"))

# A drain ends when nothing runs, even on a slow machine; a test that needs its end gives a second signal.
PATIENT = ("--drain-timeout", str(int(PATIENCE_S)))


class ServerProcess:
    def __init__(self, *arguments, port=None, authority=None, ready_path="/ready", **popen):
        """Starts a server, and waits for 200 at a path.

        With an authority's certificate, requests use HTTPS and trust this authority.
        """
        self.port = port or free_port()
        scheme = "https" if authority else "http"
        self.base_url = f"{scheme}://127.0.0.1:{self.port}"
        self.context = ssl.create_default_context(cafile=authority) if authority else None
        self._model = None
        self._ready_path = ready_path
        self._log = tempfile.TemporaryFile("w+")
        arguments = [str(argument) for argument in arguments]
        is_patient = not any(argument.startswith("--drain-timeout") for argument in arguments)
        self.process = subprocess.Popen(
            [BINARY, "serve", *(PATIENT if is_patient else ()), *arguments, "--port", str(self.port)],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            **popen,
        )
        self._wait_ready()
        self.client = openai.OpenAI(
            base_url=self.base_url + "/v1",
            api_key="unused",
            max_retries=0,
            timeout=PATIENCE_S,
            http_client=openai.DefaultHttpxClient(verify=self.context) if self.context else None,
        )

    def _wait_ready(self):
        def is_ready():
            if self.process.poll() is not None:
                raise AssertionError(f"exited with {self.process.returncode}:\n{self.log()}")
            return self.status_of(self._ready_path) == 200

        try:
            self.wait_until(is_ready, "the server is ready")
        except AssertionError:
            self.kill()
            raise

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
        """Returns the HTTP status, or None without an answer."""
        try:
            with urllib.request.urlopen(self.base_url + path, timeout=PATIENCE_S, context=self.context) as response:
                return response.status
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return None

    def metric(self, name, **labels):
        """Returns the sum of the samples with these labels."""
        with urllib.request.urlopen(self.base_url + "/metrics", timeout=PATIENCE_S, context=self.context) as response:
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
        # A counter with labels has no sample before its first count.
        assert name in names or labels, f"/metrics has no {name}"
        return total

    def wait_until(self, condition, what):
        return wait_until(condition, lambda: f"{what}\n{self.log()}")

    @contextlib.contextmanager
    def held_with_requests(self, num_requests):
        """Holds the server still while this many clients send it requests, which are all present when it continues."""
        # Clients would first request the model's name, so it is requested before.
        self.model()
        with held(self.process):
            yield
            self.wait_until(lambda: self._num_unread() >= num_requests, f"{num_requests} requests are sent")

    def _num_unread(self):
        """Returns the number of connections with bytes that the server has not read."""
        num_unread = 0
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
            _, local, _, state, queues, *_ = line.split()
            is_own = local == f"0100007F:{self.port:04X}" and state == "01"
            num_unread += is_own and int(queues.split(":")[1], 16) > 0
        return num_unread

    def threads(self, name):
        """Returns the ids of the threads with a name."""
        ids = []
        for thread in Path(f"/proc/{self.process.pid}/task").iterdir():
            # Other threads may end meanwhile.
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                if (thread / "comm").read_text() == f"{name}\n":
                    ids.append(int(thread.name))
        return ids

    def terminate(self):
        self.process.send_signal(signal.SIGTERM)

    def wait(self):
        return self.process.wait(PATIENCE_S)

    def kill(self):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(PATIENCE_S)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
