"""Tests prompts in the real server of LMCache: they outlive a server of Corella, and two of them share prompts.

CORELLA_LMCACHE names the program `lmcache` of version 0.5.6. Its environment has several gigabytes, because it needs
PyTorch, so the tests are left out without it. `kv_store` of corella-cluster tests the same rules with a server of its
own.
"""

import os
import signal
import subprocess

import pytest
from patience import PATIENCE_S, wait_until
from server_process import ServerProcess, free_port

LMCACHE = os.environ.get("CORELLA_LMCACHE")
pytestmark = [pytest.mark.night, pytest.mark.skipif(LMCACHE is None, reason="CORELLA_LMCACHE names no lmcache")]

STORY = "Once upon a time there was a fox who lived in a box by the sea, and every morning it went to the mill. " * 8
# The tokens of a chunk
CHUNK = 64
SMALL = ("--threads", 1, "--kv-cache-memory", "64M")


class Store:
    """LMCache's server, whose chunks outlive it in a folder."""

    def __init__(self, folder):
        self.folder = folder
        self.port, self.status_port = free_port(), free_port()
        self.start()

    def start(self):
        self.log = open(self.folder / "log", "w+")
        self.process = subprocess.Popen(
            [LMCACHE, "server", "--transport", "grpc", "--host", "127.0.0.1", "--port", str(self.port)]
            + ["--http-port", str(self.status_port), "--supported-transfer-mode", "engine_driven"]
            + ["--shm-name", f"corella-test-{self.port}", "--chunk-size", str(CHUNK), "--l1-size-gb", "0.25"]
            + ["--no-l1-use-lazy", "--eviction-policy", "LRU"]
            + ["--l2-adapter", f'{{"type": "fs", "base_path": "{self.folder}/kv"}}'],
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "LMCACHE_TRACK_USAGE": "false"},
        )
        wait_until(lambda: "Uvicorn running" in self.text(), self.text)

    def text(self):
        self.log.flush()
        return (self.folder / "log").read_text()

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(PATIENCE_S)

    def num_files(self):
        return sum(path.suffix == ".data" for path in (self.folder / "kv").rglob("*"))

    def serve(self):
        return ServerProcess("--kv-store", f"lmcache:{self.port},{self.status_port}", *SMALL)


@pytest.fixture
def store(tmp_path):
    (tmp_path / "kv").mkdir()
    store = Store(tmp_path)
    yield store
    if store.process.poll() is None:
        store.stop()


def ask(server, prompt=STORY):
    """Returns an answer with its log-probabilities, and the number of prompt tokens from the store."""
    answer = server.client.completions.create(
        model=server.model(), prompt=prompt, max_tokens=12, temperature=0, logprobs=3
    )
    (choice,) = answer.choices
    details = answer.usage.prompt_tokens_details.model_dump()
    # Left out when all cached tokens were in memory.
    by_medium = details.get("cached_tokens_by_medium", {"store": 0})
    return (choice.text, choice.logprobs.model_dump()), by_medium["store"]


def store_story(server, store):
    """Has the whole chunks of the story stored, and returns its answer and the number of their tokens."""
    expected, num_from_store = ask(server)
    assert num_from_store == 0
    assert ask(server)[0] == expected
    num_tokens = server.client.completions.create(model=server.model(), prompt=STORY, max_tokens=1).usage.prompt_tokens
    # The last token is always computed.
    num_chunks = (num_tokens - 1) // CHUNK
    assert num_chunks > 2
    server.wait_until(lambda: server.metric("corella_kv_store_chunks_stored_total") == num_chunks, "they are stored")
    wait_until(lambda: store.num_files() == num_chunks, lambda: f"{num_chunks} files\n{store.text()}")
    return expected, num_chunks * CHUNK


def test_a_story_outlives_both_servers_and_is_shared(store):
    with store.serve() as first, store.serve() as second:
        stored = store_story(first, store)
        assert ask(second) == stored
    store.stop()
    store.start()
    with store.serve() as third:
        assert ask(third) == stored
        assert third.metric("corella_kv_store_damaged_chunks_total") == 0


def test_the_service_goes_on_without_the_store(store):
    with store.serve() as server:
        stored = store_story(server, store)
        store.stop()
        server.wait_until(lambda: server.metric("corella_kv_store_on") == 0, "the store is missed")
        other = STORY.replace("fox", "cub")
        answer, _ = ask(server, other)
        assert server.log().count("--kv-store is off") == 1
        store.start()
        server.wait_until(lambda: server.metric("corella_kv_store_on") == 1, "the store is back")
        assert server.log().count("--kv-store is on") == 1
        assert ask(server, other)[0] == answer
    with store.serve() as server:
        assert ask(server) == stored

