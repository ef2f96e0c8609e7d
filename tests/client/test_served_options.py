"""Tests options that change the meaning of requests, or the address of the server."""

import http.client
import json
import signal
import socket
import stat
import subprocess
import urllib.request

import pytest
from patience import PATIENCE_S, wait_until
from server_process import BINARY, PATIENT, ServerProcess

MOCK = ("--device", "mock", "--mock-dictation", "one two three")
TEMPLATE = "{{ 'loud' if enable_thinking else 'quiet' }} {{ messages[0].content }}"


def post(server, path, body):
    request = urllib.request.Request(
        server.base_url + path,
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
        return json.load(response)


def prompt(server, **fields):
    """Returns the prompt of a conversation."""
    messages = [{"role": "user", "content": "hello"}]
    tokens = post(server, "/tokenize", {"messages": messages, **fields})["tokens"]
    return post(server, "/detokenize", {"tokens": tokens})["prompt"]


@pytest.mark.parametrize("how", ["file", "text"])
def test_a_chat_template_and_its_variables_come_from_options(tmp_path, how):
    file = tmp_path / "template.jinja"
    file.write_text(TEMPLATE)
    template = file if how == "file" else TEMPLATE
    kwargs = ("--default-chat-template-kwargs", '{"enable_thinking": true}')
    with ServerProcess(*MOCK, "--chat-template", template, *kwargs) as server:
        assert prompt(server).strip() == "loud hello"
        # A request's own field takes precedence.
        asked = {"chat_template_kwargs": {"enable_thinking": False}}
        assert prompt(server, **asked).strip() == "quiet hello"


def defaults(server):
    """Returns the sampling defaults in force from Ollama's API: lines of a name and a value."""
    lines = post(server, "/api/show", {"model": server.model()})["parameters"].splitlines()
    return {name: float(value) for name, value in map(str.split, lines)}


def test_generation_defaults_are_replaced(tmp_path):
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.25, "top_k": 7}')
    with ServerProcess(*MOCK, "--generation-config", tmp_path) as server:
        found = defaults(server)
        assert (found["temperature"], found["top_k"]) == (0.25, 7)
    overrides = ("--override-generation-config", '{"temperature": 0.5, "min_p": 0.125}')
    with ServerProcess(*MOCK, "--generation-config", tmp_path, *overrides) as server:
        found = defaults(server)
        assert (found["temperature"], found["top_k"], found["min_p"]) == (0.5, 7, 0.125)
    with ServerProcess(*MOCK, "--generation-config", "vllm", *overrides) as server:
        assert "top_k" not in defaults(server)


def test_a_path_before_all_others_is_taken_and_may_be_left_out():
    with ServerProcess(*MOCK, "--root-path", "/llm/") as server:
        for path in ("/v1/models", "/llm/v1/models", "/health", "/llm/health"):
            assert server.status_of(path) == 200, path
        for path in ("/other/v1/models", "/llm/llm/v1/models", "/llmv1/models"):
            assert server.status_of(path) == 404, path
        body = {"prompt": "x", "max_tokens": 2}
        assert post(server, "/llm/v1/completions", body)["usage"]["completion_tokens"] == 2
        assert f"API {server.base_url}/llm/v1" in server.log()


def test_several_names_behind_one_option(golden_folder):
    model = ("--device", "mock", "--model", golden_folder)
    with ServerProcess(*model, "--served-model-name", "a", "b") as server:
        assert [model.id for model in server.client.models.list()] == ["a", "b"]


class UnixConnection(http.client.HTTPConnection):
    def __init__(self, path):
        super().__init__("localhost", timeout=PATIENCE_S)
        self.path = path

    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(PATIENCE_S)
        self.sock.connect(str(self.path))


def status(path):
    try:
        connection = UnixConnection(path)
        connection.request("GET", "/v1/models")
        return connection.getresponse().status
    except OSError:
        return None


def start(path):
    return subprocess.Popen(
        [BINARY, "serve", *PATIENT, *MOCK, "--uds", str(path)],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_server_listens_on_a_socket_of_the_file_system(tmp_path):
    path = tmp_path / "corella.sock"
    first = start(path)
    wait_until(lambda: status(path) == 200 or first.poll() is not None, "the server answers")
    assert status(path) == 200
    # Two servers cannot share one socket, and the second server leaves it unchanged.
    second = start(path)
    _, error = second.communicate(timeout=PATIENCE_S)
    assert second.returncode == 2 and "cannot listen on" in error and path.name in error
    assert status(path) == 200
    # A killed server leaves the file, and the next server takes it.
    first.kill()
    first.communicate()
    assert stat.S_ISSOCK(path.stat().st_mode)
    third = start(path)
    wait_until(lambda: status(path) == 200 or third.poll() is not None, "the server answers")
    assert status(path) == 200
    third.send_signal(signal.SIGTERM)
    third.communicate(timeout=PATIENCE_S)
    assert third.returncode == 0 and not path.exists()
    # Other files stay unchanged.
    path.write_text("mine")
    fourth = start(path)
    fourth.communicate(timeout=PATIENCE_S)
    assert fourth.returncode == 2 and path.read_text() == "mine"
