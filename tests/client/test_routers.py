"""Other projects' routers in front of a pair: prompts are computed on one node and answered on the other.

`cargo xtask night clients` installs the routers pinned in `routers/requirements.lock`.
"""

import contextlib
import itertools
import json
import os
import subprocess
import tempfile
import urllib.request
from pathlib import Path

import openai
import pytest
from kv_event_reader import Publisher
from patience import PATIENCE_S, wait_until
from server_process import ROOT, ServerProcess, free_port

pytestmark = pytest.mark.night

# The interpreter of the routers' environment.
PROGRAMS = Path(os.environ.get("CORELLA_ROUTERS", ROOT / "target/ci-routers/bin/python")).parent
THREADS = ("--threads", 1)
NODE = ("--cluster-listen", "127.0.0.1:0", *THREADS)
MESSAGES = [{"role": "user", "content": "Tell me a story about a fox and a lantern, please, and do not stop too early."}]
# How each router is started, and whether it is told of its nodes at run time. smg does not ask nodes for their
# connector, and pairs them without a transfer of KV unless it is given the connector.
ROUTERS = {
    "vllm-router": (["--vllm-pd-disaggregation", "--kv-connector", "nixl", "--worker-startup-check-interval", "1"], False),
    "smg": (["launch", "--enable-igw", "--backend", "vllm"], True),
}


@contextlib.contextmanager
def running(name, *arguments):
    """Yields the URL of a router, a function that gets one of its paths, and a function that returns its log."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [PROGRAMS / name, *arguments, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--prometheus-port", str(free_port())]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)

        def text():
            log.seek(0)
            return log.read()

        def answers(path):
            assert process.poll() is None, text()
            with contextlib.suppress(OSError):
                return fetch(url + path)
            return None

        try:
            yield url, answers, text
        finally:
            process.kill()
            process.wait(PATIENCE_S)


@contextlib.contextmanager
def router(name, prefill, decode):
    """Yields the URL of a router in front of two nodes."""
    arguments, is_told_later = ROUTERS[name]
    nodes = [] if is_told_later else ["--prefill", prefill.base_url, "--decode", decode.base_url]
    with running(name, *arguments, *nodes) as (url, answers, text):

        def has_both():
            workers = json.loads(answers("/workers") or "{}").get("workers", [])
            return [worker["status"] for worker in workers] == ["ready", "ready"]

        if is_told_later:
            wait_until(lambda: answers("/workers"), lambda: f"the router is there\n{text()}")
            for node, kind in (prefill, "prefill"), (decode, "decode"):
                worker = {"url": node.base_url, "worker_type": kind, "runtime_type": "vllm"}
                fetch(url + "/workers", worker | {"kv_connector": "NixlConnector", "kv_role": "kv_both"})
            wait_until(has_both, lambda: f"the router knows both nodes\n{text()}")
        else:
            wait_until(lambda: answers("/readiness"), lambda: f"the router is ready\n{text()}")
        yield url


def fetch(url, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        return answer.read().decode()


def client_of(url):
    return openai.OpenAI(base_url=url + "/v1", api_key="unused", max_retries=0, timeout=PATIENCE_S)


def chat(client, **options):
    return client.chat.completions.create(
        model="corella-nano", messages=MESSAGES, temperature=0, max_tokens=20, **options
    )


@pytest.mark.parametrize("name", ROUTERS)
def test_a_router_has_one_node_compute_prompts_and_the_other_answer(name):
    with ServerProcess(*NODE) as prefill, ServerProcess(*NODE) as decode, router(name, prefill, decode) as url:
        client = client_of(url)
        # The answer of one node alone.
        expected = chat(prefill.client).choices[0].message.content
        assert chat(client).choices[0].message.content == expected
        stream = chat(client, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices) == expected
        completion = client.completions.create(model="corella-nano", prompt="A fox", temperature=0, max_tokens=8)
        alone = prefill.client.completions.create(model="corella-nano", prompt="A fox", temperature=0, max_tokens=8)
        assert completion.choices[0].text == alone.choices[0].text
        pulled = sum(decode.metric("corella_kv_pulls_total", outcome=outcome) for outcome in ("loaded", "cached"))
        assert pulled == 3, "each prompt was computed by the prefill node"


def test_a_router_that_hears_kv_events_chooses_the_node_that_has_the_prefix():
    with Publisher() as first, Publisher() as second:
        nodes = (first, second)
        arguments = ["--policy", "kv_aware", "--kv-event-model", "corella-nano", "--worker-startup-check-interval", "1"]
        arguments += ["--worker-urls", *(node.base_url for node in nodes)]
        for node in nodes:
            arguments += ["--kv-event-source", f"{node.base_url}=tcp://127.0.0.1:{node.event_port}"]
            arguments += ["--kv-event-replay-source", f"{node.base_url}=tcp://127.0.0.1:{node.replay_port}"]
        with running("vllm-router", *arguments) as (url, answers, text):
            wait_until(lambda: answers("/readiness"), lambda: f"the router is ready\n{text()}")
            for node in nodes:
                node.wait_until(lambda: node.metric("corella_kv_event_subscribers") == 1, "the router has subscribed")
            client = client_of(url)

            def complete(client, prompt):
                client.completions.create(model="corella-nano", prompt=prompt, temperature=0, max_tokens=2)

            def chosen(prompt):
                before = [node.metric("corella_prompt_tokens_total") for node in nodes]
                complete(client, prompt)
                (node,) = [
                    node for node, count in zip(nodes, before) if node.metric("corella_prompt_tokens_total") > count
                ]
                return node

            def prime(name):
                """Makes each node compute a text of its own."""
                texts = [f"{name} of {at}: " + "A fox finds a lantern in the snow. " * 8 for at in range(2)]
                for node, prompt in zip(nodes, texts):
                    complete(node.client, prompt)
                return texts

            stories = [prime(f"Story {number}") for number in range(2)]
            numbers = itertools.count()

            def knows_last():
                # A node chosen by mistake has the text from then on, so each attempt has texts of its own.
                marks = prime(f"Mark {next(numbers)}")
                return [chosen(mark + "And then?") for mark in marks] == [*nodes]

            # A router that knows the last texts has read all earlier events.
            wait_until(knows_last, lambda: f"the router knows what is cached\n{text()}")
            for texts in stories:
                for node, prompt in zip(nodes, texts):
                    assert chosen(prompt + "What happens next?") is node
