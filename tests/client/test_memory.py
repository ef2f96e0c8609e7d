"""Checks the memory that a server's allocator keeps after threads and bodies have gone."""

import concurrent.futures
import http.client
import json
import os
import platform
import re
from pathlib import Path

import pytest
from patience import PATIENCE_S
from server_process import ServerProcess

NUM_CLIENTS = 16
NUM_REQUESTS = 16
# A number takes two bytes of a body, and sixteen times as many once it is read.
NUMBERS = list(range(10)) * 100_000
LARGE_BODY_BYTES = 1 << 20
# The allowed growth of a server's memory by such bodies.
MAX_KEPT_BYTES = 300e6

SCHEMA = {
    "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": NUMBERS}}},
}
TEMPLATE_ARGUMENTS = {"chat_template_kwargs": {"a": NUMBERS}}


def resident_bytes(server):
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return 1024 * int(re.search(r"VmRSS:\s+(\d+)", status)[1])


def num_arenas(server):
    """Returns the number of glibc's arenas besides the first thread's: each reserves aligned 64 MiB, and uses some."""
    num_arenas, reserved = 0, 64 << 20
    lines = Path(f"/proc/{server.process.pid}/maps").read_text().splitlines()
    regions = [(line.split()[0], line.split()[1]) for line in lines]
    for (used, may), (rest, rest_may) in zip(regions, regions[1:]):
        start, used_end = (int(place, 16) for place in used.split("-"))
        rest_start, end = (int(place, 16) for place in rest.split("-"))
        is_joined = used_end == rest_start and (may, rest_may) == ("rw-p", "---p")
        num_arenas += is_joined and start % reserved == 0 and end == start + reserved
    return num_arenas


def status_of(server, body):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
    try:
        connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
        return connection.getresponse().status
    finally:
        connection.close()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator")
@pytest.mark.parametrize("chosen", [None, 2])
def test_there_are_two_arenas_for_each_core_or_as_many_as_are_chosen(chosen):
    environment = {name: value for name, value in os.environ.items() if name not in ("MALLOC_ARENA_MAX", "GLIBC_TUNABLES")}
    environment |= {"MALLOC_ARENA_MAX": str(chosen)} if chosen else {}
    cores = sorted(os.sched_getaffinity(0))[:2]
    with ServerProcess(
        "--threads", 1, env=environment, preexec_fn=lambda: os.sched_setaffinity(0, cores)
    ) as server:
        body = json.dumps({"model": server.model(), "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4})
        with concurrent.futures.ThreadPoolExecutor(NUM_CLIENTS) as pool:
            assert set(pool.map(lambda _: status_of(server, body), range(4 * NUM_CLIENTS))) == {200}
        num_threads = len(list(Path(f"/proc/{server.process.pid}/task").iterdir()))
        assert num_threads > 6, "each could have one"
        # The first thread's arena is not counted.
        assert num_arenas(server) == (chosen or 2 * len(cores)) - 1


@pytest.mark.night
@pytest.mark.parametrize("fields, num_at_once", [(SCHEMA, 1), (TEMPLATE_ARGUMENTS, NUM_CLIENTS)])
def test_memory_of_large_bodies_goes_back(fields, num_at_once):
    # A larger KV cache is cleared while no request runs.
    with ServerProcess("--threads", 1, "--kv-cache-memory", "16M") as server:
        common = {"model": server.model(), "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
        assert status_of(server, json.dumps(common)) == 200
        before = resident_bytes(server)
        body = json.dumps(common | fields, separators=(",", ":"))
        assert len(body) > LARGE_BODY_BYTES
        with concurrent.futures.ThreadPoolExecutor(num_at_once) as pool:
            statuses = set(pool.map(lambda _: status_of(server, body), range(NUM_REQUESTS)))
        # If many come at once, some find no room for their body.
        assert statuses <= {200, 400, 429}, statuses
        server.wait_until(
            lambda: resident_bytes(server) < before + MAX_KEPT_BYTES,
            f"memory goes back to {before / 1e6:.0f} MB and a little",
        )
        assert status_of(server, json.dumps(common)) == 200
