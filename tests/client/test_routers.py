"""Routers of others in front of a pair: prompts are computed on one node and answered on the other.

`cargo xtask night clients` installs the routers that are pinned in `routers/requirements.lock`.
"""

import contextlib
import json
import os
import subprocess
import tempfile
import urllib.request
from pathlib import Path

import openai
import pytest
from patience import PATIENCE_S, wait_until
from server_process import ROOT, ServerProcess, free_port

pytestmark = pytest.mark.night

# The interpreter of the environment that has them.
PROGRAMS = Path(os.environ.get("CORELLA_ROUTERS", ROOT / "target/ci-routers/bin/python")).parent
THREADS = ("--threads", 1)
NODE = ("--cluster-listen", "127.0.0.1:0", *THREADS)
MESSAGES = [{"role": "user", "content": "Tell me a story about a fox and a lantern, please, and do not stop too early."}]
# How each is started, and whether it is told of its nodes when it runs. smg asks nodes for no connector, and pairs
# without a transfer of KV unless it is told theirs.
ROUTERS = {
    "vllm-router": (["--vllm-pd-disaggregation", "--kv-connector", "nixl", "--worker-startup-check-interval", "1"], False),
    "smg": (["launch", "--enable-igw", "--backend", "vllm"], True),
}


@contextlib.contextmanager
def router(name, prefill, decode):
    """Yields the URL of a router in front of two nodes."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    arguments, is_told_later = ROUTERS[name]
    command = [PROGRAMS / name, *arguments, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--prometheus-port", str(free_port())]
    if not is_told_later:
        command += ["--prefill", prefill.base_url, "--decode", decode.base_url]
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

        def has_both():
            workers = json.loads(answers("/workers") or "{}").get("workers", [])
            return [worker["status"] for worker in workers] == ["ready", "ready"]

        try:
            if is_told_later:
                wait_until(lambda: answers("/workers"), lambda: f"the router is there\n{text()}")
                for node, kind in (prefill, "prefill"), (decode, "decode"):
                    worker = {"url": node.base_url, "worker_type": kind, "runtime_type": "vllm"}
                    fetch(url + "/workers", worker | {"kv_connector": "NixlConnector", "kv_role": "kv_both"})
                wait_until(has_both, lambda: f"the router knows both nodes\n{text()}")
            else:
                wait_until(lambda: answers("/readiness"), lambda: f"the router is ready\n{text()}")
            yield url
        finally:
            process.kill()
            process.wait(PATIENCE_S)


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
