"""Tests prefill and decode on different nodes: same answers, and what happens when nodes go."""

import concurrent.futures
import contextlib
import random
import shutil
import socket
import subprocess
import tempfile
import time

import pytest
from server_process import ServerProcess, free_port

# Portable kernels take seconds for a long request, so that it still runs when the test looks.
SLOW = ("--isa", "portable", "--threads", 1)
THREADS = ("--threads", 1)


@contextlib.contextmanager
def etcd():
    """Yields the address of an etcd of its own."""
    assert shutil.which("etcd"), "etcd is missing: cargo xtask set-up installs it"
    client, peer = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            ["etcd", "--data-dir", folder, "--listen-client-urls", client]
            + ["--advertise-client-urls", client, "--listen-peer-urls", peer]
            + ["--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            address = client.removeprefix("http://")
            host, port = address.split(":")
            deadline = time.monotonic() + 10
            while True:
                with contextlib.suppress(OSError), socket.create_connection((host, int(port))):
                    break
                assert time.monotonic() < deadline, "etcd does not answer"
                time.sleep(0.05)
            yield address
        finally:
            process.kill()
            process.wait()


def node(role, registry, *arguments):
    return ServerProcess("--role", role, "--registry", registry, *arguments)


def num_steps(server):
    return server.metric("corella_steps_total")


def wait_for_decode_nodes(prefill, num_nodes):
    """Waits until the prefill node has found so many healthy decode nodes."""
    prefill.wait_until(
        lambda: prefill.metric("corella_decode_nodes", standing="healthy") == num_nodes,
        f"{num_nodes} decode nodes are healthy",
    )


def complete(server, prompt, **options):
    answer = server.client.completions.create(model=server.model(), prompt=prompt, **options)
    return [(choice.text, choice.finish_reason) for choice in answer.choices]


def requests(num_requests):
    """Yields prompts that partly begin alike, with many ways to draw tokens."""
    numbers = random.Random(1)
    beginning = [numbers.randrange(300, 2000) for _ in range(200)]
    for _ in range(num_requests):
        own = [numbers.randrange(300, 2000) for _ in range(numbers.randrange(1, 60))]
        prompt = beginning[: numbers.choice([0, 16, 64, 200])] + own
        options = numbers.choice(
            [
                {"temperature": 0},
                {"temperature": 0, "logprobs": 3},
                {"temperature": 1, "seed": numbers.randrange(1000)},
                {"temperature": 1, "seed": numbers.randrange(1000), "n": 2},
                {"temperature": 0.8, "seed": 3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
                {"temperature": 0, "stop": [" the", "."]},
            ]
        )
        yield prompt, {"max_tokens": numbers.randrange(1, 30), **options}


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_a_fleet_answers_as_one_server_does(transport):
    cluster = ("--transport", transport, *THREADS)
    with contextlib.ExitStack() as stack:
        registry = f"etcd:{stack.enter_context(etcd())}/corella"
        alone = stack.enter_context(ServerProcess(*THREADS))
        decode = [stack.enter_context(node("decode", registry, *cluster)) for _ in range(2)]
        prefill = [stack.enter_context(node("prefill", registry, *cluster)) for _ in range(2)]
        for server in prefill:
            wait_for_decode_nodes(server, 2)
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            asked = list(requests(60))
            answers = [
                pool.submit(complete, prefill[at % 2], prompt, **options)
                for at, (prompt, options) in enumerate(asked)
            ]
            expected = [
                pool.submit(complete, alone, prompt, **options) for prompt, options in asked
            ]
            for answer, lone in zip(answers, expected):
                assert answer.result() == lone.result()
        assert all(num_steps(server) > 0 for server in decode), "both decode nodes have worked"


def test_a_killed_decode_node_leaves_no_gap_in_a_stream():
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        registry = f"file:{folder}"
        decode = stack.enter_context(node("decode", registry, *SLOW))
        prefill = stack.enter_context(node("prefill", registry, *SLOW))
        wait_for_decode_nodes(prefill, 1)
        options = {"max_tokens": 400, "temperature": 0, "extra_body": {"ignore_eos": True}}
        stream = prefill.client.completions.create(
            model=prefill.model(), prompt=[400, 401, 402] * 20, stream=True, **options
        )
        text = "".join(next(stream).choices[0].text for _ in range(20))
        decode.kill()
        text += "".join(chunk.choices[0].text for chunk in stream)
        alone = complete(prefill, [400, 401, 402] * 20, **options)
        assert [(text, "length")] == alone


def test_a_decode_node_that_is_told_to_go_finishes_what_it_has():
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        registry = f"file:{folder}"
        decode = stack.enter_context(node("decode", registry, *SLOW))
        prefill = stack.enter_context(node("prefill", registry, *SLOW))
        wait_for_decode_nodes(prefill, 1)
        stream = prefill.client.completions.create(
            model=prefill.model(),
            prompt=[400, 401, 402],
            stream=True,
            max_tokens=300,
            temperature=0,
            extra_body={"ignore_eos": True},
        )
        next(stream)
        decode.terminate()
        before = num_steps(prefill)
        chunks = list(stream)
        assert chunks[-1].choices[0].finish_reason == "length"
        assert num_steps(prefill) - before < 100, "most of it came from the decode node"
        assert decode.wait() == 0
        # Others are served here from now on.
        assert complete(prefill, [400, 401], max_tokens=3)[0][1] == "length"


def test_a_port_in_use_is_one_line():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(AssertionError, match=f"cannot listen on --cluster-listen {address}"):
            ServerProcess("--role", "decode", "--cluster-listen", address)
