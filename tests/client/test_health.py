"""Tests the gRPC health service with gRPC's own client."""

import contextlib

import grpc
import pytest
from certificate import Authority
from server_process import ServerProcess, free_port
from test_lifetime import SLOW, stream_long
from fleet import THREADS
from patience import PATIENCE_S

SERVING, NOT_SERVING, SERVICE_UNKNOWN = 1, 2, 3


@contextlib.contextmanager
def decode_node(*arguments):
    """Starts a decode node, and yields it with the address of its port for other nodes."""
    address = f"127.0.0.1:{free_port()}"
    with ServerProcess("--role", "decode", "--cluster-listen", address, *arguments) as server:
        yield server, address


def request(service):
    """Encodes a `HealthCheckRequest`: field 1, absent when it is empty."""
    name = service.encode()
    return b"\x0a" + bytes([len(name)]) + name if name else b""


def status(response):
    """Decodes a `HealthCheckResponse`: field 1, a small number, absent when it is 0."""
    assert response[:1] in (b"", b"\x08"), response
    return response[1] if response else 0


def check(channel, service=""):
    method = channel.unary_unary("/grpc.health.v1.Health/Check", None, status)
    return method(request(service), timeout=PATIENCE_S)


def watch(channel, service=""):
    method = channel.unary_stream("/grpc.health.v1.Health/Watch", None, status)
    return method(request(service), timeout=PATIENCE_S)


def test_a_node_that_takes_sessions_is_serving():
    with decode_node(*THREADS) as (_, address), grpc.insecure_channel(address) as channel:
        assert check(channel) == SERVING
        assert check(channel, "corella.cluster.v1.Sessions") == SERVING
        with pytest.raises(grpc.RpcError) as error:
            check(channel, "another.Service")
        assert error.value.code() == grpc.StatusCode.NOT_FOUND
        watcher = watch(channel, "another.Service")
        assert next(watcher) == SERVICE_UNKNOWN
        watcher.cancel()


def test_a_watcher_hears_that_the_node_drains():
    with decode_node(*SLOW) as (server, address), grpc.insecure_channel(address) as channel:
        watcher = watch(channel)
        assert next(watcher) == SERVING
        running = stream_long(server)
        next(running)
        server.terminate()
        assert next(watcher) == NOT_SERVING
        assert check(channel) == NOT_SERVING
        running.close()
        assert server.wait() == 0


def test_health_is_told_to_holders_of_a_certificate_only(tmp_path):
    authority = Authority(tmp_path)
    options = dict(zip(*[iter(authority.options("node"))] * 2))
    with decode_node(*authority.options("decode"), *THREADS) as (_, address):
        ca, key, cert = (
            options[f"--cluster-tls-{end}"].read_bytes() for end in ("ca", "key", "cert")
        )
        with grpc.secure_channel(address, grpc.ssl_channel_credentials(ca, key, cert)) as channel:
            assert check(channel) == SERVING
        for credentials in (
            grpc.ssl_channel_credentials(ca),
            grpc.experimental.insecure_channel_credentials(),
        ):
            with grpc.secure_channel(address, credentials) as channel:
                with pytest.raises(grpc.RpcError) as error:
                    check(channel)
                assert error.value.code() == grpc.StatusCode.UNAVAILABLE
