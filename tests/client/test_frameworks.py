"""Tests frameworks with clients of their own against the built binary.

Frameworks are imported where they are used, because importing takes seconds even if no test of this file runs.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest
from patience import PATIENCE_S
from server_process import ROOT, ServerProcess
from test_tools import CITY, dictating_server

TEXT = "Tell me a story about a fox and a lantern."
MAX_TOKENS = 24
# `cargo xtask e2e` makes this environment of `llama_index/requirements.txt`.
LLAMA_INDEX = Path(os.environ.get("CORELLA_LLAMA_INDEX", ROOT / "target/ci-llama-index/bin/python"))


pytestmark = pytest.mark.night


@pytest.fixture(scope="module")
def server():
    with ServerProcess() as server:
        yield server


@pytest.fixture(scope="module")
def expected(server):
    """Returns the values that OpenAI's own client reads."""
    completion = server.client.chat.completions.create(
        model=server.model(),
        messages=[{"role": "user", "content": TEXT}],
        temperature=0,
        max_tokens=MAX_TOKENS,
    )
    return completion.choices[0].message.content


@pytest.mark.parametrize("use_responses_api", [False, True])
def test_langchain(server, expected, use_responses_api):
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(
        base_url=server.base_url + "/v1",
        api_key="unused",
        model=server.model(),
        temperature=0,
        max_tokens=MAX_TOKENS,
        use_responses_api=use_responses_api,
    )
    assert model.invoke(TEXT).text == expected
    assert "".join(chunk.text for chunk in model.stream(TEXT)) == expected


def test_langchain_with_messages(server, expected):
    from langchain_anthropic import ChatAnthropic

    model = ChatAnthropic(
        base_url=server.base_url,
        api_key="unused",
        model=server.model(),
        max_tokens=MAX_TOKENS,
        model_kwargs={"extra_body": {"temperature": 0}},
    )
    assert model.invoke(TEXT).text == expected
    assert "".join(chunk.text for chunk in model.stream(TEXT)) == expected


def test_litellm(server, expected):
    import litellm

    fields = {
        "model": f"openai/{server.model()}",
        "api_base": server.base_url + "/v1",
        "api_key": "unused",
        "messages": [{"role": "user", "content": TEXT}],
        "temperature": 0,
        "max_tokens": MAX_TOKENS,
    }
    assert litellm.completion(**fields).choices[0].message.content == expected
    chunks = litellm.completion(**fields, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected


def test_llama_index(server, expected, tmp_path):
    with dictating_server("hermes", tmp_path) as dictated:
        command = [LLAMA_INDEX, Path(__file__).parent / "llama_index/ask.py", server.base_url, server.model()]
        command += [dictated.base_url, dictated.model(), TEXT, str(MAX_TOKENS)]
        run = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert run.returncode == 0, run.stderr
    read = json.loads(run.stdout)
    assert read == {"chat": expected, "stream": expected, "calls": [["get_weather", CITY]], "call_text": "I look."}
