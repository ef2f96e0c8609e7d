"""Runs the fleet that the book starts with one command."""

import json
import os
import random
import re
import shlex
import signal
import socket
import subprocess
import urllib.request

import pytest
from patience import PATIENCE_S, wait_until
from server_process import BINARY, ROOT

PAGE = ROOT / "docs/src/cluster.md"


@pytest.fixture
def environment(tmp_path):
    (tmp_path / "corella").symlink_to(BINARY.resolve())
    return os.environ | {
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
        "PORT": str(free_ports(4)),
        "ETCD_PORT": str(free_ports(2)),
    }


def free_ports(num_ports):
    """Returns the first of this many consecutive free ports.

    They are below the range from which systems choose ports for connections, of which many may linger after other
    tests.
    """
    while True:
        first = random.randrange(20_000, 30_000)
        if all(is_free(first + number) for number in range(num_ports)):
            return first


def is_free(port):
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def documented(language):
    """Returns the commands of the section about the fleet, to be run by one shell."""
    section = PAGE.read_text().split("## A fleet on one machine")[1].split("\n## ")[0]
    (command,) = re.findall(rf"^```{language}\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    return command


def remote_tokens(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE_S) as response:
        page = response.read().decode()
    return float(re.search(r"^corella_remote_tokens_total\{.*\} (\S+)$", page, re.MULTILINE)[1])


def test_one_command_starts_a_fleet_that_can_be_loaded(environment, tmp_path):
    port = int(environment["PORT"])
    fleet = subprocess.Popen(
        shlex.split(documented("text")),
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert fleet.stdout.readline().startswith("ready: ")
        prefill_ports = [port, port + 1]
        load = documented("sh").replace("8000 8001", " ".join(map(str, prefill_ports)))
        load = load.replace("bench serve", f"bench serve --output-json {tmp_path}/load-$port.json")

        def decode_nodes_help():
            done = subprocess.run(
                ["bash", "-c", load], env=environment, capture_output=True, text=True, timeout=PATIENCE_S
            )
            for prefill_port in prefill_ports:
                answered = json.loads((tmp_path / f"load-{prefill_port}.json").read_text())
                assert (answered["completed"], answered["failed"]) == (20, 0), done.stderr
            return all(remote_tokens(prefill_port) > 0 for prefill_port in prefill_ports)

        # Decode nodes have a tenth of a second to take a request, which may be too short on a busy machine.
        wait_until(decode_nodes_help, "decode nodes take requests of the load")
    finally:
        fleet.send_signal(signal.SIGINT)
        assert fleet.wait(PATIENCE_S) == 0
    assert all(is_free(port + number) for number in range(4)), "nothing is left running"


def test_a_fleet_that_cannot_start_says_why(environment):
    with socket.create_server(("127.0.0.1", int(environment["PORT"]) + 1)):
        fleet = subprocess.run(
            shlex.split(documented("text")), cwd=ROOT, env=environment, capture_output=True, text=True, timeout=PATIENCE_S
        )
    assert fleet.returncode == 1
    assert f"cannot listen on 127.0.0.1:{int(environment['PORT']) + 1}" in fleet.stderr
