"""Tests servers that a request starts, on the socket of a supervisor, and that end when they are idle."""

import concurrent.futures
import json
import select
import socket
import subprocess
import tempfile

import pytest
from patience import PATIENCE_S
from server_process import BINARY

# The shell's standard input is the socket. systemd passes it as the first descriptor after the standard ones.
ACTIVATE = 'export LISTEN_PID=$$ LISTEN_FDS={number}; exec "$@" 3<&0 </dev/null'
BODY = json.dumps({"prompt": "Once", "max_tokens": 4, "temperature": 0}).encode()


class Supervisor:
    """Keeps a listening socket, and starts servers for it."""

    def __init__(self, kind, folder):
        if kind == "tcp":
            self.socket = socket.create_server(("127.0.0.1", 0))
            self.shown = "http://127.0.0.1:%d" % self.socket.getsockname()[1]
        else:
            self.shown = str(folder / "corella.sock")
            self.socket = socket.socket(socket.AF_UNIX)
            self.socket.bind(self.shown)
            self.socket.listen()
        self.process = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close()
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def ask(self, head, body=b""):
        """Sends a request on a connection of its own, and returns the whole answer."""
        with socket.socket(self.socket.family) as client:
            client.settimeout(PATIENCE_S)
            client.connect(self.socket.getsockname())
            client.sendall(f"{head} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n".encode())
            client.sendall(b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
            return b"".join(iter(lambda: client.recv(1 << 16), b"")).decode()

    def start(self, *options, number=1):
        """Starts a server on the socket."""
        self._log = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            ["sh", "-c", ACTIVATE.format(number=number), "sh", BINARY, "serve", "--device", "mock", *options],
            stdin=self.socket,
            stdout=subprocess.DEVNULL,
            stderr=self._log,
        )

    def wait(self):
        return self.process.wait(PATIENCE_S)

    def log(self):
        self._log.seek(0)
        return self._log.read()


@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_a_request_starts_a_server_which_ends_when_it_is_idle(kind, tmp_path):
    with Supervisor(kind, tmp_path) as supervisor, concurrent.futures.ThreadPoolExecutor() as pool:
        answers = []
        for _ in range(2):
            answer = pool.submit(supervisor.ask, "POST /v1/completions", BODY)
            assert select.select([supervisor.socket], [], [], PATIENCE_S)[0], "the client connects"
            supervisor.start("--exit-when-idle", "1s", "--uds", str(tmp_path / "unused"))
            head, body = answer.result(PATIENCE_S).split("\r\n\r\n", 1)
            # The model was loaded while the request waited.
            assert head.startswith("HTTP/1.1 200"), head
            answers.append(json.loads(body)["choices"])
            assert supervisor.wait() == 0
            log = supervisor.log()
            assert supervisor.shown in log and "no request came" in log, log
        assert answers[0] == answers[1]
        # The socket is still the supervisor's.
        assert kind == "tcp" or (tmp_path / "corella.sock").is_socket()
        assert not (tmp_path / "unused").exists()


def test_a_restart_loses_no_request(tmp_path):
    with Supervisor("tcp", tmp_path) as supervisor, concurrent.futures.ThreadPoolExecutor() as pool:
        supervisor.start()
        assert supervisor.ask("GET /ready").startswith("HTTP/1.1 200")
        supervisor.process.terminate()
        assert supervisor.wait() == 0
        waiting = pool.submit(supervisor.ask, "POST /v1/completions", BODY)
        assert select.select([supervisor.socket], [], [], PATIENCE_S)[0], "the client connects"
        supervisor.start()
        assert waiting.result(PATIENCE_S).startswith("HTTP/1.1 200")


def test_a_server_takes_one_socket(tmp_path):
    with Supervisor("tcp", tmp_path) as supervisor:
        supervisor.start(number=2)
        assert supervisor.wait() == 2
        assert "LISTEN_FDS is 2: a server listens on one socket" in supervisor.log()


def test_a_server_with_other_nodes_does_not_end_as_idle():
    refused = subprocess.run(
        [BINARY, "serve", "--role", "decode", "--exit-when-idle", "10m"], capture_output=True, text=True
    )
    assert refused.returncode == 2
    assert "--exit-when-idle does not work beside other nodes" in refused.stderr
