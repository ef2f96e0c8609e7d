"""`corella chat --url`: the conversation of a terminal with a running server."""

import contextlib
import json
import os
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import certificate
import pytest
from patience import PATIENCE_S
from server_process import BINARY, ServerProcess, free_port
from terminal import OPTIONS, PROMPT, Terminal, control

QUESTION = "Tell me a story about a fox."
NAMES = ("--served-model-name", "nano", "--served-model-name", "corella-nano")
GREEDY = ("--temperature", "0", "--max-tokens", "12")


def pipe(text, *options, **variables):
    environment = {**os.environ, **variables}
    result = subprocess.run(
        [BINARY, "chat", *options], input=text, capture_output=True, text=True, timeout=PATIENCE_S, env=environment
    )
    return result.returncode, result.stdout, result.stderr


def refusal(*options, text=QUESTION + "\n", **variables):
    """Returns the only line of a chat that the server or the network ends."""
    status, answers, log = pipe(text, *options, **variables)
    assert (status, answers) == (2, "") and log.startswith("error: ") and log.count("\n") == 1, log
    return log.removeprefix("error: ").rstrip("\n")


@pytest.fixture(scope="module")
def server():
    with ServerProcess("--threads", "1", "--kv-cache-memory", "64M", *NAMES) as server:
        yield server


@contextlib.contextmanager
def other_server(answer):
    """A foreign server: `answer` gives a path's response, as a status, a type and parts of a body."""
    seen = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            length = int(self.headers.get("content-length", 0))
            seen.append((self.path, self.headers.get("authorization"), self.rfile.read(length)))
            status, kind, parts = answer(self.path)
            self.send_response(status)
            self.send_header("content-type", kind)
            self.end_headers()
            for part in parts:
                self.wfile.write(part.encode())

        do_POST = do_GET

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as served:
        thread = threading.Thread(target=served.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{served.server_port}", seen
        finally:
            served.shutdown()


def test_a_conversation_with_a_server(tmp_path, server):
    terminal = Terminal(
        tmp_path, "--url", server.base_url, "--model", "corella-nano", "--temperature", "0", model_options=()
    )
    assert "there is no answer yet" in terminal.ask("/stats")
    terminal.ask("/set max_tokens 12")
    first = terminal.ask(QUESTION)
    assert len(first.split()) > 10
    stats = terminal.ask("/stats")
    assert "answer 12 tokens" in stats and "of 2048" in stats
    assert terminal.ask("/retry") == first
    saved = tmp_path / "fox.json"
    terminal.ask(f"/save {saved}")
    second = terminal.ask("And then?")
    terminal.ask("/clear")
    terminal.ask(f"/load {saved}")
    assert terminal.ask("And then?") == second
    assert "top_p" in terminal.ask("/set top_p 7") + terminal.ask("hello"), "the server's error is shown"
    terminal.ask("/set top_p")
    terminal.ask("/set max_tokens 2000000000")
    assert "/clear starts a new conversation" in terminal.ask("hello")
    terminal.write("/bye\n")
    assert terminal.leave() == 0


def test_ctrl_c_ends_an_answer_and_not_the_chat(tmp_path, server):
    aborted = lambda: server.metric("corella_request_success_total", finished_reason="abort")
    before = aborted()
    terminal = Terminal(tmp_path, "--url", server.base_url, "corella-nano", model_options=())
    terminal.ask("/set ignore_eos true")
    terminal.write("Tell me a long story.\n")
    terminal.read_until("\n")
    terminal.read_until(" ")
    terminal.write(control("C"))
    assert "(stopped)" in terminal.read_until("\n" + PROMPT)
    server.wait_until(lambda: aborted() == before + 1, "the server ends the request")
    assert "has not told the number of tokens" in terminal.ask("/stats")
    terminal.ask("/set max_tokens 4")
    assert terminal.ask("Go on.")
    assert "answer 4 tokens" in terminal.ask("/stats")
    terminal.write(control("D"))
    assert terminal.leave() == 0


def test_a_server_answers_as_a_loaded_model_does(server):
    lines = QUESTION + "\nAnd then?\n"
    loaded = pipe(lines, *OPTIONS, "--max-tokens", "12")
    # The port without a scheme and the API's own prefix also work.
    for url in (server.base_url, server.base_url + "/v1/", server.base_url.removeprefix("http://")):
        assert pipe(lines, "--url", url, *GREEDY) == loaded, url


def test_what_is_wrong_is_said_in_a_line(server):
    port = free_port()
    line = refusal("--url", f"http://127.0.0.1:{port}")
    assert f"no server listens at http://127.0.0.1:{port}" in line and "--url" in line
    line = refusal("--url", server.base_url + "/llm")
    assert "no list of models at /llm/v1/models" in line
    line = refusal("--url", server.base_url, "--model", "gpt-9")
    assert "refuses the model gpt-9" in line and "--model names one of nano" in line
    assert "only http and https" in refusal("--url", "ftp://127.0.0.1")
    assert "is not found" in refusal("--url", "http://no-such-host.invalid")
    line = refusal("--url", server.base_url.replace("http:", "https:"))
    assert "http://" in line and "TLS" in line


@pytest.mark.parametrize("option", [("--threads", "2"), ("--kv-cache-memory", "64M"), ("--dtype", "int8")])
def test_options_of_a_loaded_model_are_refused(option):
    status, answers, log = pipe("", "--url", "http://127.0.0.1:1", *option)
    assert (status, answers) == (2, "") and f"'--url <URL>' cannot be used with '{option[0]}" in log


def test_keys():
    with ServerProcess("--device", "mock", "--api-key", "sesame") as server:
        url = ("--url", server.base_url)
        line = refusal(*url)
        assert "wants a key: give one with --api-key" in line
        line = refusal(*url, "--api-key", "simsalabim")
        assert "does not accept the key" in line and "simsalabim" not in line
        for key in ({"CORELLA_API_KEY": "sesame"}, {}):
            typed = () if key else ("--api-key", "sesame")
            status, answers, log = pipe("hello\n", *url, *typed, "--max-tokens", "3", **key)
            assert (status, log) == (0, "") and answers


def test_https(tmp_path):
    authority = certificate.Authority(tmp_path)
    cert, key = authority.issue("server")
    options = ("--device", "mock", "--tls-cert", cert, "--tls-key", key)
    with ServerProcess(*options, authority=authority.certificate) as server:
        url = ("--url", server.base_url, "--max-tokens", "3")
        assert "SSL_CERT_FILE" in refusal(*url)
        status, answers, log = pipe("hello\n", *url, SSL_CERT_FILE=str(authority.certificate))
        assert (status, log) == (0, "") and answers
        plain = server.base_url.replace("https:", "http:")
        assert "https://" in refusal("--url", plain)


def event(**delta):
    choice = {"index": 0, "delta": delta, "finish_reason": None}
    return "data: " + json.dumps({"choices": [choice]})


END = 'data: {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}'


def test_servers_of_others():
    """A server without `/v1`, whose lines end with a carriage return, and which reports neither usage nor lengths."""
    answer = [event(role="assistant"), ": ping", event(reasoning="Hm."), event(content="Hel"), event(content="lo"), END]

    def paths(path):
        if path == "/openai/models":
            return 200, "application/json", [json.dumps({"data": [{"id": "m"}, {"id": "n"}]})]
        if path == "/openai/chat/completions":
            return 200, "text/event-stream", [f"{line}\r\n\r\n" for line in [*answer, "data: [DONE]"]]
        return 404, "text/html", ["<html>nothing here</html>"]

    with other_server(paths) as (url, seen):
        assert pipe("hi\n/set seed 4\nho\n", "--url", url + "/openai", "--api-key", "k") == (0, "Hello\nHello\n", "")
        bodies = [json.loads(body) for path, _, body in seen if path.endswith("completions")]
        assert {authorization for _, authorization, _ in seen} == {"Bearer k"}
        assert [body["model"] for body in bodies] == ["m", "m"]
        assert bodies[1]["messages"] == [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "Hello"},
            {"role": "user", "content": "ho"},
        ]
        assert bodies[1]["seed"] == 4
        assert "no list of models at /v1/models" in refusal("--url", url)


@pytest.mark.parametrize(
    "parts, reason",
    [
        ([event(content="Hel") + "\n\n"], "ended the answer before it was whole"),
        (['data: {"error": {"message": "the GPU fell off"}}\n\n'], "the GPU fell off"),
        (["data: nonsense\n\n"], "is not JSON"),
    ],
)
def test_a_stream_that_breaks_is_an_error(parts, reason):
    def paths(path):
        if path.endswith("/models"):
            return 200, "application/json", [json.dumps({"data": [{"id": "m"}]})]
        return 200, "text/event-stream", parts

    with other_server(paths) as (url, _):
        status, _, log = pipe("hi\n", "--url", url)
        assert status == 2 and reason in log and log.count("\n") == 1
