"""The gRPC port: health, keys, hostile frames, TLS and the end of a server, with the official client."""

import contextlib
import http.client
import socket
import subprocess

import grpc
import pytest
from certificate import Authority
from grpc_call import failure, stream, unary
from patience import PATIENCE_S
from server_process import BINARY, ServerProcess, free_port

CHECK, WATCH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"
SERVING, NOT_SERVING, SERVICE_UNKNOWN = b"\x08\x01", b"\x08\x02", b"\x08\x03"


def named(service):
    """A HealthCheckRequest."""
    return b"\x0a" + bytes([len(service)]) + service.encode()


@contextlib.contextmanager
def grpc_server(*arguments, credentials=None, **more):
    port = free_port()
    with ServerProcess("--grpc-port", port, *arguments, **more) as server:
        target = f"127.0.0.1:{port}"
        channel = grpc.secure_channel(target, credentials) if credentials else grpc.insecure_channel(target)
        with channel:
            server.grpc_port, server.channel = port, channel
            yield server


@pytest.fixture(scope="module")
def server():
    with grpc_server("--device", "mock") as server:
        yield server


def test_the_health_of_known_services(server):
    assert unary(server.channel, CHECK) == SERVING
    assert unary(server.channel, CHECK, named("vllm.Inference")) == SERVING
    code, details = failure(server.channel, CHECK, named("sglang.Engine"))
    assert code == grpc.StatusCode.NOT_FOUND
    assert details == "There is no service `sglang.Engine` here."
    watch = stream(server.channel, WATCH, named("sglang.Engine"))
    assert next(watch) == SERVICE_UNKNOWN
    watch.cancel()


def test_an_unknown_method_is_unimplemented(server):
    code, details = failure(server.channel, "/sglang.Engine/Generate")
    assert code == grpc.StatusCode.UNIMPLEMENTED
    assert "/sglang.Engine/Generate" in details
    assert server.metric("corella_http_requests_total", path="other", status="501") >= 1


def frame(kind, flags, stream_id, payload):
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream_id.to_bytes(4, "big") + payload


def literal(name, value):
    return b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value


def outcome(port, body, *, path=CHECK.encode()):
    """Sends the body of a call, byte for byte, and returns the status in the answer's headers."""
    headers = b"\x83\x86" + literal(b":path", path) + literal(b":authority", b"x")
    headers += literal(b"content-type", b"application/grpc") + literal(b"te", b"trailers")
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as client:
        client.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, b""))
        client.sendall(frame(1, 4, 1, headers))
        client.sendall(frame(0, 1, 1, body))
        received = client.makefile("rb")
        while True:
            head = received.read(9)
            assert len(head) == 9, "the connection was closed"
            payload = received.read(int.from_bytes(head[:3], "big"))
            if head[3] == 1:
                # A whole answer in its headers ends the stream.
                assert head[4] & 1
                return payload


@pytest.mark.parametrize(
    "body",
    [b"", b"\0\0\0\0", b"\0\0\0\0\2x", b"\0\xff\xff\xff\xffx", b"\0\0\0\0\0" * 2, b"\1\0\0\0\0", b"\7\0\0\0\0"],
)
def test_a_body_that_is_no_single_plain_message_is_refused(server, body):
    before = server.metric("corella_http_requests_total", path=CHECK)
    outcome(server.grpc_port, body)
    status = "501" if body[:1] == b"\1" else "400"
    server.wait_until(
        lambda: server.metric("corella_http_requests_total", path=CHECK) > before, "the call is counted"
    )
    assert server.metric("corella_http_requests_total", path=CHECK, status=status) >= 1
    assert unary(server.channel, CHECK) == SERVING


def test_a_message_above_the_limit_of_bodies_is_refused(server):
    code, details = failure(server.channel, CHECK, b"\x0a\x80\x80\x80\x08" + bytes(16 << 20))
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert "larger than" in details


def test_http_1_gets_no_answer_of_the_api(server):
    client = http.client.HTTPConnection("127.0.0.1", server.grpc_port, timeout=PATIENCE_S)
    with pytest.raises((http.client.HTTPException, ConnectionError)):
        client.request("GET", "/v1/models")
        client.getresponse()


def test_a_server_that_ends_says_so_and_ends_watches():
    with grpc_server("--device", "mock") as server:
        watch = stream(server.channel, WATCH)
        assert next(watch) == SERVING
        server.terminate()
        assert next(watch) == NOT_SERVING
        with pytest.raises(grpc.RpcError) as error:
            next(watch)
        assert error.value.code() == grpc.StatusCode.UNAVAILABLE
        assert server.wait() == 0


def test_tls_holds(tmp_path):
    authority = Authority(tmp_path)
    cert, key = authority.issue("server")
    trust = grpc.ssl_channel_credentials(authority.certificate.read_bytes())
    tls = ("--tls-cert", cert, "--tls-key", key)
    with grpc_server("--device", "mock", *tls, credentials=trust, authority=authority.certificate) as server:
        assert unary(server.channel, CHECK) == SERVING


def refusal_of(*arguments):
    done = subprocess.run([BINARY, "serve", *arguments], capture_output=True, text=True, timeout=600)
    assert done.returncode != 0
    return done.stderr


def test_options_that_do_not_fit_are_refused_by_name(tmp_path):
    keys = tmp_path / "keys.toml"
    keys.write_text('[[key]]\nname = "web"\nkey = "sk-web-3f1c9a7e5b2d4068"\n')
    options = ("--grpc-port", "0", "--api-keys", str(keys), "--grpc-api-key", "gateway")
    assert "--api-keys has no key of this name" in refusal_of("--device", "mock", *options)
    assert "--grpc-port" in refusal_of("--device", "mock", "--grpc-port", "0", "--keep-alive", "5m")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert "of --grpc-port" in refusal_of("--device", "mock", "--grpc-port", port, "--port", "0")


