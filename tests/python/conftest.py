"""Fixtures of the tests of the Python package, which is installed in the environment that runs them."""

import os
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

import pytest
from corella import LLM

ROOT = Path(__file__).resolve().parents[2]
# Tests of clients have the module in which tests wait.
CLIENT_TESTS = str(ROOT / "tests/client")
sys.path.append(CLIENT_TESTS)
from patience import PATIENCE_S

# A shell starts what runs in the background with SIGINT ignored, and programs that tests start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def llm():
    with LLM(kv_cache_memory="64M") as llm:
        yield llm


@pytest.fixture(scope="session")
def server():
    """The base URL of the built binary, serving the same model."""
    with Served([os.environ.get("CORELLA_BIN", ROOT / "target/release/corella"), "serve", "--port", "0"]) as served:
        yield served.base_url


class Served:
    """A server as a process of its own. Its standard error is read, so that it never waits for a reader."""

    def __init__(self, command):
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        self.lines = []
        self.base_url = None
        self._is_ready = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()
        assert self._is_ready.wait(PATIENCE_S) and self.base_url, "".join(self.lines)

    def _read(self):
        for line in self.process.stderr:
            self.lines.append(line)
            if ready := re.match(r"ready: page (http://[\d.:]+)/", line):
                self.base_url = ready[1]
                self._is_ready.set()
        self._is_ready.set()

    def get(self, path):
        with urllib.request.urlopen(self.base_url + path, timeout=PATIENCE_S) as response:
            return response.read()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(PATIENCE_S)
