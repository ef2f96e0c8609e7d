"""Tests that a server answers while nothing reads its log."""

import contextlib
import http.client
import os
import re
import signal
import subprocess

from patience import PATIENCE_S, wait_until
from server_process import BINARY, free_port

# Each line has the path, of up to 256 characters. A pipe holds 65,536 bytes, and the server keeps another megabyte.
NUM_REQUESTS = 4000
PATH = "/" + 255 * "x"


class UnreadServer:
    """A server whose standard error is a pipe that only the test may read."""

    def __init__(self, *arguments):
        self.port = free_port()
        self._pipe, stderr = os.pipe()
        command = [BINARY, "serve", "--port", str(self.port), *arguments]
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr)
        os.close(stderr)
        wait_until(self._is_ready, "the server is ready")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait(PATIENCE_S)
        os.close(self._pipe)

    def _is_ready(self):
        assert self.process.poll() is None, self.read_to_the_end()
        with contextlib.suppress(OSError), self.connect() as connection:
            return status_of(connection, "/ready") == 200

    def connect(self):
        return contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S))

    def read_until(self, pattern):
        """Reads the log until a line matches, and returns the text."""
        text = b""
        while not re.search(pattern, text):
            part = os.read(self._pipe, 1 << 16)
            assert part, text[-2000:].decode()
            text += part
        return text.decode()

    def read_to_the_end(self):
        with open(self._pipe, closefd=False) as pipe:
            return pipe.read()

    def terminate(self):
        self.process.send_signal(signal.SIGTERM)


def status_of(connection, path):
    connection.request("GET", path)
    response = connection.getresponse()
    response.read()
    return response.status


def fill_log(server):
    with server.connect() as connection:
        for _ in range(NUM_REQUESTS):
            assert status_of(connection, PATH) == 404


def test_a_server_with_an_unread_log_answers_and_ends():
    with UnreadServer() as server:
        fill_log(server)
        with server.connect() as connection:
            body = '{"prompt": "Once upon a time", "max_tokens": 4}'
            connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
            assert connection.getresponse().status == 200
        server.terminate()
        assert server.process.wait(PATIENCE_S) == 0


def test_lost_lines_are_counted_once_the_log_is_read():
    with UnreadServer("--log-format", "json") as server:
        fill_log(server)
        text = server.read_until(rb"(\d+) log lines were lost[^\n]*\n")
        (num_lost,) = re.findall(r'"level":"WARN","message":"(\d+) log lines were lost: the log was not read"', text)
        server.terminate()
        text += server.read_to_the_end()
        assert text.count('"message":"answered"') + int(num_lost) == NUM_REQUESTS
        assert '"message":"draining"' in text
        assert server.process.wait(PATIENCE_S) == 0
