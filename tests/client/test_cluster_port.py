"""Silent or invalid connections to a node's ports for other nodes: the node's own API answers meanwhile."""

import contextlib
import os
import resource
import socket
from pathlib import Path

from fleet import Fleet, complete, complete_remotely, prompt_of
from server_process import ServerProcess, free_port

MAX_FILES = 340


def num_files(server):
    return len(os.listdir(f"/proc/{server.process.pid}/fd"))


def listening_ports(server):
    """Returns the listening ports of a server, besides its API's."""
    inodes = set()
    for file in Path(f"/proc/{server.process.pid}/fd").iterdir():
        # Other files may be closed meanwhile.
        with contextlib.suppress(FileNotFoundError):
            inodes.add(os.readlink(file).removeprefix("socket:[").rstrip("]"))
    ports = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        listens = fields[3] == "0A"
        if listens and fields[9] in inodes:
            ports.add(int(fields[1].split(":")[1], 16))
    return ports - {server.port}


def test_silent_connections_leave_the_api_its_files():
    port = free_port()
    options = ("--role", "decode", "--device", "mock", "--cluster-listen", f"127.0.0.1:{port}")

    def few_files():
        resource.setrlimit(resource.RLIMIT_NOFILE, (MAX_FILES, MAX_FILES))

    with ServerProcess(*options, preexec_fn=few_files) as server, contextlib.ExitStack() as silent:
        for _ in range(400):
            connection = silent.enter_context(socket.socket())
            # Connections beyond the limit wait in the system's queue, and then outside of it.
            connection.setblocking(False)
            connection.connect_ex(("127.0.0.1", port))
        bound = "connections of other nodes are open, and more wait"
        server.wait_until(lambda: bound in server.log(), "as many are open as may be")
        for number in range(20):
            complete(server, prompt_of(20, number), max_tokens=4)
            assert server.status_of("/ready") == 200
            assert num_files(server) < MAX_FILES / 2
        assert server.log().count(bound) == 1


def test_connections_that_speak_no_protocol_are_one_line():
    with Fleet() as fleet:
        decode, prefill = (start("--device", "mock", "--transport", "tcp") for start in (fleet.decode, fleet.prefill))
        complete_remotely(prefill, prompt_of(30), max_tokens=4)
        ports = listening_ports(prefill) | listening_ports(decode)
        # The decode node has a port for sessions, and each node has a port for KV rows.
        assert len(ports) == 3
        for port in ports:
            for _ in range(200):
                with socket.create_connection(("127.0.0.1", port)) as connection:
                    connection.sendall(b"\xac" * 64)
                    with contextlib.suppress(ConnectionResetError):
                        while connection.recv(4096):
                            pass
        complete_remotely(prefill, prompt_of(31), max_tokens=4)
        for node in (prefill, decode):
            assert node.log().count("closed the KV connection") == 1
