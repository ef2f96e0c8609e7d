"""Access to a server: keys with limits, HTTPS, other origins, slow clients."""

import hashlib
import json
import signal
import socket
import ssl
import subprocess
import urllib.error
import urllib.request

import openai
import pytest
from certificate import Authority
from patience import PATIENCE_S
from server_process import BINARY, ServerProcess

WEB, REPORTS, OPERATOR = "sk-web-3f1c9a7e5b2d4068", "sk-reports-77aa01f2c3d4", "sk-ops-9b0c21d4e8f7a635"


def write_keys(path, web_requests=3):
    digest = hashlib.sha256(REPORTS.encode()).hexdigest()
    path.write_text(
        f"""
[[key]]
name = "web"
key = "{WEB}"
requests-per-minute = {web_requests}

[[key]]
name = "reports"
sha256 = "{digest}"
tokens-per-minute = 40

[[key]]
name = "operator"
key = "{OPERATOR}"
admin = true
"""
    )


@pytest.fixture
def keyed(tmp_path, monkeypatch):
    monkeypatch.setenv("RUST_LOG", "trace")
    path = tmp_path / "keys.toml"
    write_keys(path)
    with ServerProcess("--device", "mock", "--api-keys", path) as server:
        server.keys = path
        yield server
        server.terminate()
        assert server.wait() == 0
        log = server.log()
        for key in (WEB, REPORTS, OPERATOR, "sk-wrong-wrong-wrong"):
            assert key not in log


def client_of(server, key, max_retries=0):
    return openai.OpenAI(base_url=server.base_url + "/v1", api_key=key, max_retries=max_retries)


def complete(client, **more):
    return client.completions.create(
        model="corella-nano", prompt="Once", extra_body={"ignore_eos": True}, **{"max_tokens": 2, **more}
    )


def status_of(server, path, body=None, headers=()):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(server.base_url + path, data, dict(headers))
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S, context=server.context) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_wrong_and_missing_keys(keyed):
    for headers in (
        {},
        {"authorization": "Bearer sk-wrong-wrong-wrong"},
        {"authorization": f"Basic {WEB}"},
        {"authorization": f"Bearer {WEB}x"},
        {"authorization": f"Bearer {WEB[:-1]}"},
        {"x-api-key": ""},
    ):
        for path, body in (
            ("/v1/models", None),
            ("/v1/completions", {"prompt": "Once"}),
            ("/tokenize", {"prompt": "Once"}),
            ("/reset_prefix_cache", {}),
            ("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "/a"}),
        ):
            status, text = status_of(keyed, path, body, headers)
            assert status == 401, (path, headers)
            assert WEB not in text and "sk-wrong" not in text
    with pytest.raises(openai.AuthenticationError):
        complete(client_of(keyed, "sk-wrong-wrong-wrong"))
    # A refused key has used up nothing.
    assert complete(client_of(keyed, WEB)).usage.completion_tokens == 2


def lines_of(server, **facts):
    lines = [json.loads(line) for line in server.log().splitlines() if '"answered"' in line]
    return [line for line in lines if all(line.get(name) == value for name, value in facts.items())]


def test_the_line_of_a_request_names_key_model_and_outcome(tmp_path):
    path = tmp_path / "keys.toml"
    write_keys(path)
    options = ("--device", "mock", "--api-keys", path, "--log-format", "json")
    with ServerProcess(*options) as server:
        client = client_of(server, REPORTS)
        for name in ("first", "second"):
            client.completions.create(
                model="corella-nano", prompt=[5] * 18, max_tokens=1, extra_headers={"x-request-id": name}
            )
        server.wait_until(lambda: len(lines_of(server, key="reports")) == 2, "lines")
        (line,) = lines_of(server, id="second")
        assert (line["model"], line["status"], line["finish"]) == ("corella-nano", 200, "length")
        # The last token is computed anew.
        assert (line["prompt_tokens"], line["cached_tokens"], line["output_tokens"]) == (18, 17, 1)
        assert 0 <= line["ttft"] <= line["seconds"] and "error" not in line
        # The key may use 40 tokens a minute.
        with pytest.raises(openai.RateLimitError):
            client.completions.create(model="corella-nano", prompt=[5] * 18, max_tokens=1)
        assert status_of(server, "/v1/completions", {"prompt": "Once"})[0] == 401
        chat = {"model": "x", "messages": [{"role": "user", "content": "Once"}]}
        assert status_of(server, "/api/chat", chat, {"authorization": f"Bearer {WEB}"})[0] == 404
        server.wait_until(lambda: lines_of(server, path="/api/chat"), "a line")
        (limited,) = lines_of(server, status=429)
        assert (limited["key"], limited["error"]) == ("reports", "rate_limit_exceeded")
        (refused,) = lines_of(server, status=401)
        assert refused["error"] == "invalid_api_key" and "key" not in refused
        (unknown,) = lines_of(server, status=404)
        assert unknown["error"] == "model_not_found" and "model" not in unknown
        # A browser loads the page.
        for path in ("/", "/page/main.js", "/page/base.css"):
            assert status_of(server, path)[0] == 200
        status_of(server, "/v1/models")
        server.wait_until(lambda: lines_of(server, path="/v1/models"), "a line")
        assert not [line for line in lines_of(server) if line["path"].startswith("/page") or line["path"] == "/"]


def test_a_key_has_its_own_limit_of_requests(keyed):
    client = client_of(keyed, WEB)
    for left in (2, 1, 0):
        raw = client.completions.with_raw_response.create(
            model="corella-nano", prompt="Once", max_tokens=2
        )
        assert raw.headers["x-ratelimit-limit-requests"] == "3"
        assert int(raw.headers["x-ratelimit-remaining-requests"]) == left
    with pytest.raises(openai.RateLimitError) as refused:
        complete(client)
    assert refused.value.code == "rate_limit_exceeded"
    # One request is allowed every 20 seconds.
    assert 1 <= int(refused.value.response.headers["retry-after"]) <= 20
    assert complete(client_of(keyed, OPERATOR)).usage.completion_tokens == 2
    # Reading is free.
    assert client.models.list().data


def test_a_key_has_its_own_limit_of_tokens(keyed):
    client = client_of(keyed, REPORTS)
    used = complete(client, max_tokens=60).usage.total_tokens
    assert used > 60
    with pytest.raises(openai.RateLimitError) as refused:
        complete(client)
    # The key owes its tokens beyond 40, and 40 tokens a minute are two in three seconds.
    wait_s = int(refused.value.response.headers["retry-after-ms"]) / 1000
    assert 0 < wait_s <= (used - 40 + 10) * 1.5


def test_a_stream_counts_too(keyed):
    client = client_of(keyed, REPORTS)
    chunks = list(complete(client, max_tokens=60, stream=True))
    assert chunks[-1].choices[0].finish_reason == "length"
    with pytest.raises(openai.RateLimitError):
        complete(client)


def test_only_an_admin_changes_the_server(keyed):
    for key, status in ((WEB, 403), (OPERATOR, 200)):
        headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        assert status_of(keyed, "/reset_prefix_cache", {}, headers)[0] == status


def test_hangup_reads_the_keys_again(keyed):
    client = client_of(keyed, WEB)
    for _ in range(3):
        complete(client)
    keyed.keys.write_text("[[key]]\nname = 5\n")
    keyed.process.send_signal(signal.SIGHUP)
    keyed.wait_until(lambda: "the API keys were not reloaded" in keyed.log(), "the mistake is reported")
    assert "line 2: `name`" in keyed.log()
    with pytest.raises(openai.RateLimitError):
        complete(client)
    write_keys(keyed.keys, web_requests=5)
    keyed.process.send_signal(signal.SIGHUP)
    keyed.wait_until(lambda: "read the API keys again" in keyed.log(), "they are read")
    assert complete(client).usage.completion_tokens == 2
    keyed.keys.write_text(f'[[key]]\nname = "operator"\nkey = "{OPERATOR}"\n')
    keyed.process.send_signal(signal.SIGHUP)
    keyed.wait_until(lambda: keyed.log().count("read the API keys again") == 2, "they are read")
    with pytest.raises(openai.AuthenticationError):
        complete(client)


def test_a_hangup_without_files_to_read_ends_nothing():
    with ServerProcess() as server:
        server.process.send_signal(signal.SIGHUP)
        server.wait_until(lambda: "nothing to reload" in server.log(), "the signal is taken")
        assert server.client.completions.create(model=server.model(), prompt="a", max_tokens=2).usage


def test_an_official_client_waits_as_long_as_it_is_told(tmp_path):
    path = tmp_path / "keys.toml"
    # 60 a minute: after the first 60, one more fits each second.
    path.write_text(f'[[key]]\nname = "web"\nkey = "{WEB}"\nrequests-per-minute = 60\n')
    with ServerProcess("--device", "mock", "--api-keys", path) as server:
        # With one retry, a client that does not wait long enough fails.
        client = client_of(server, WEB, max_retries=1)

        def is_refused_once():
            complete(client, max_tokens=1)
            return server.metric("corella_http_requests_total", status="429") == 1

        server.wait_until(is_refused_once, "the key's limit is reached")


@pytest.fixture
def authority(tmp_path):
    return Authority(tmp_path)


def secured(authority, *arguments, certificate=None):
    cert, key = certificate or authority.issue("server")
    options = ("--device", "mock", "--tls-cert", cert, "--tls-key", key, *arguments)
    return ServerProcess(*options, authority=authority.certificate)


def refused(*arguments):
    """Returns the error of a server that does not start."""
    command = [BINARY, "serve", "--device", "mock", "--port", "0", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 2, done.stderr
    return done.stderr


def test_https(authority):
    with secured(authority) as server:
        assert f"ready: page {server.base_url}/, API {server.base_url}/v1" in server.log()
        chunks = list(complete(server.client, max_tokens=20, stream=True))
        assert chunks[-1].choices[0].finish_reason == "length"
        for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
            context = ssl.create_default_context(cafile=authority.certificate)
            context.minimum_version = context.maximum_version = version
            with urllib.request.urlopen(server.base_url + "/ready", context=context) as response:
                assert response.status == 200
        # A client that only knows another authority.
        with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
            urllib.request.urlopen(server.base_url + "/ready", context=ssl.create_default_context())
        server.terminate()
        assert server.wait() == 0


def test_plain_http_to_the_port_of_https_is_told_so(authority):
    with secured(authority) as server:
        with pytest.raises(urllib.error.HTTPError) as told:
            urllib.request.urlopen(f"http://127.0.0.1:{server.port}/v1/models")
        assert told.value.code == 400
        assert "use https://" in json.load(told.value)["error"]["message"]
        assert server.status_of("/ready") == 200


def test_what_is_wrong_with_a_certificate_is_said_at_start(authority, tmp_path):
    good, key = authority.issue("good")
    _, other_key = authority.issue("other")
    expired, expired_key = authority.issue("expired", days=-1)
    empty = tmp_path / "empty.pem"
    empty.write_text("")
    for options, reason in (
        (("--tls-cert", expired, "--tls-key", expired_key), "has expired: renew it"),
        (("--tls-cert", good, "--tls-key", other_key), "is not the key of --tls-cert"),
        (("--tls-cert", empty, "--tls-key", key), "contains no PEM certificate"),
        (("--tls-cert", good, "--tls-key", empty), "contains no PEM private key"),
        (("--tls-cert", good, "--tls-key", tmp_path / "none.key"), "cannot read --tls-key"),
        (("--tls-cert", good), "--tls-key"),
    ):
        said = refused(*options)
        assert reason in said
        assert "BEGIN" not in said and len(said.splitlines()) <= 6


def peer_certificate(server):
    with socket.create_connection(("127.0.0.1", server.port)) as plain:
        with server.context.wrap_socket(plain, server_hostname="127.0.0.1") as stream:
            return stream.getpeercert(binary_form=True)


def test_a_renewed_certificate_is_used_without_a_restart(authority):
    cert, key = authority.issue("server")
    with secured(authority, certificate=(cert, key)) as server:
        first = peer_certificate(server)
        renewed, renewed_key = authority.issue("renewed")
        cert.write_bytes(renewed.read_bytes())
        server.process.send_signal(signal.SIGHUP)
        # One file is renewed before the other.
        server.wait_until(lambda: "the certificate was not reloaded" in server.log(), "it is reported")
        assert peer_certificate(server) == first
        key.write_bytes(renewed_key.read_bytes())
        server.process.send_signal(signal.SIGHUP)
        server.wait_until(lambda: peer_certificate(server) != first, "it is used")
        second = peer_certificate(server)
        expired, expired_key = authority.issue("expired", days=-1)
        cert.write_bytes(expired.read_bytes())
        key.write_bytes(expired_key.read_bytes())
        # Nothing announces the new files; the server checks by itself.
        server.wait_until(lambda: "has expired: renew it" in server.log(), "it is seen")
        assert peer_certificate(server) == second
        assert "PRIVATE KEY" not in server.log()


def test_clients_that_never_finish_a_handshake_hold_up_no_other(authority):
    with secured(authority) as server:
        silent = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(50)]
        for connection in silent[::2]:
            # The beginning of a record that never ends.
            connection.sendall(b"\x16\x03\x01\x02\x00\x01")
        assert complete(server.client).usage.completion_tokens == 2
        for connection in silent:
            connection.settimeout(PATIENCE_S)
            assert connection.recv(1) == b""
            connection.close()
        assert server.status_of("/ready") == 200


def test_connections_are_bounded():
    with ServerProcess("--device", "mock", "--max-connections", 2, "--verbose") as server:
        assert "connections 2," in server.log()
        request = b"GET /ready HTTP/1.1\r\nhost: a\r\n\r\n"
        first, second, waiting = (socket.create_connection(("127.0.0.1", server.port)) for _ in range(3))
        for connection in (first, second):
            connection.sendall(request)
            assert connection.recv(4096).startswith(b"HTTP/1.1 200")
        waiting.sendall(request)
        # Clients with a connection are answered again and again, and the waiting client is not.
        for _ in range(50):
            first.sendall(request)
            assert first.recv(4096).startswith(b"HTTP/1.1 200")
        waiting.setblocking(False)
        with pytest.raises(BlockingIOError):
            waiting.recv(1)
        first.close()
        waiting.settimeout(PATIENCE_S)
        assert waiting.recv(4096).startswith(b"HTTP/1.1 200")
    assert "--max-connections" in refused("--max-connections", 0)


def ask(server, method, path, headers, body=None):
    request = urllib.request.Request(server.base_url + path, body, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
            return response.status, response.headers
    except urllib.error.HTTPError as error:
        return error.code, error.headers


PREFLIGHT = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type",
}


def test_pages_of_other_origins(tmp_path):
    friend, stranger = "https://chat.example.org", "https://chat.example.com"
    write_keys(tmp_path / "keys.toml")
    options = ("--device", "mock", "--api-keys", tmp_path / "keys.toml")
    with ServerProcess(*options, "--cors-allow-origin", friend) as server:
        for path in ("/v1/chat/completions", "/v1/messages", "/api/chat", "/api/tags", "/completion", "/props"):
            # Browsers send a preflight request, without a key.
            status, headers = ask(server, "OPTIONS", path, {"origin": friend, **PREFLIGHT})
            assert status == 204, path
            assert headers["access-control-allow-origin"] == friend
            assert headers["access-control-allow-headers"] == "authorization,content-type"
            assert "POST" in headers["access-control-allow-methods"]
            status, headers = ask(server, "OPTIONS", path, {"origin": stranger, **PREFLIGHT})
            assert status == 403 and headers["access-control-allow-origin"] is None, path
        assert f"--cors-allow-origin {stranger} lets them" in server.log()
        key = {"authorization": f"Bearer {WEB}"}
        for origin, allowed in ((friend, friend), (stranger, None)):
            status, headers = ask(server, "GET", "/v1/models", {"origin": origin, **key})
            assert (status, headers["access-control-allow-origin"]) == (200, allowed)
            assert "origin" in headers["vary"]
        # A page may read errors too.
        status, headers = ask(server, "POST", "/v1/completions", {"origin": friend}, b"{}")
        assert (status, headers["access-control-allow-origin"]) == (401, friend)
        assert "x-ratelimit-remaining-tokens" in headers["access-control-expose-headers"]
    with ServerProcess("--device", "mock", "--cors-allow-origin", "*") as server:
        status, headers = ask(server, "GET", "/v1/models", {"origin": stranger})
        assert (status, headers["access-control-allow-origin"]) == (200, "*")
    with ServerProcess("--device", "mock") as server:
        status, headers = ask(server, "GET", "/v1/models", {"origin": stranger})
        assert (status, headers["access-control-allow-origin"], headers["vary"]) == (200, None, None)
    assert "is not an origin" in refused("--cors-allow-origin", "https://chat.example.org/")
