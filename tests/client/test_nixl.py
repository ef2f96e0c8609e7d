"""Tests nodes whose KV rows travel by NIXL, with the real library."""

import signal
import subprocess

import pytest
from fleet import (
    NIXL_LIBRARY,
    THREADS,
    Fleet,
    complete,
    complete_remotely,
    num_remote_tokens,
    num_steps,
    random_requests,
    wait_at_rest,
)
from patience import PATIENCE_S
from server_process import BINARY, ServerProcess

BY_NIXL = ("--transport", "nixl", *THREADS)


@pytest.fixture(autouse=True)
def library(monkeypatch):
    assert NIXL_LIBRARY.exists(), "NIXL is missing: cargo xtask set-up installs it"
    monkeypatch.setenv("CORELLA_NIXL_LIBRARY", str(NIXL_LIBRARY))


# UCX chooses among all networks by itself, or is held to TCP.
@pytest.mark.parametrize("networks", [None, "tcp"])
def test_a_pair_by_nixl_answers_as_one_server_does(networks, monkeypatch):
    if networks:
        monkeypatch.setenv("UCX_TLS", networks)
    asked = list(random_requests(40))
    with Fleet() as fleet, ServerProcess(*THREADS) as alone:
        decode = fleet.decode(*BY_NIXL)
        prefill = fleet.prefill(*BY_NIXL)
        for prompt, options in asked:
            expected = complete(alone, prompt, **options)
            assert complete(prefill, prompt, **options) == expected, (prompt, options)
        assert num_remote_tokens(prefill) > 0
        # Two connections, and one line for the peer.
        assert decode.log().count("KV rows from") == 1
        assert "come by NIXL" in decode.log()
        wait_at_rest(prefill, decode)
        for server in (prefill, decode):
            server.terminate()
            assert server.wait() == 0, server.log()


def test_a_restarted_prefill_node_is_read_again():
    prompt = list(range(400, 900))
    with Fleet() as fleet:
        decode = fleet.decode(*BY_NIXL)
        answers = []
        for life in range(3):
            prefill = fleet.prefill(*BY_NIXL)
            # A prompt of its own, so that its rows are sent.
            complete(prefill, [300 + life, *prompt], max_tokens=5, temperature=0)
            answers.append(complete(prefill, prompt, max_tokens=5, temperature=0))
            assert num_remote_tokens(prefill) > 0
            prefill.process.send_signal(signal.SIGKILL)
            prefill.wait()
        assert answers[0] == answers[1] == answers[2]
        assert decode.log().count("come by NIXL") == 3
        assert num_steps(decode) > 0
        wait_at_rest(decode)


@pytest.mark.parametrize("with_nixl", ["prefill", "decode"])
def test_a_pair_with_nixl_at_one_end_uses_tcp(with_nixl):
    over_tcp = ("--transport", "tcp", *THREADS)
    with Fleet() as fleet, ServerProcess(*THREADS) as alone:
        decode = fleet.decode(*(BY_NIXL if with_nixl == "decode" else over_tcp))
        prefill = fleet.prefill(*(BY_NIXL if with_nixl == "prefill" else over_tcp))
        prompt = list(range(400, 500))
        options = {"max_tokens": 20, "temperature": 1, "seed": 3}
        assert complete_remotely(prefill, prompt, **options) == complete(alone, prompt, **options)
        says_why = "come over TCP, not by NIXL: it runs without NIXL" in decode.log()
        assert says_why == (with_nixl == "decode")


def refusal(*arguments):
    """Runs a start that must fail, and returns the one line that it prints."""
    result = subprocess.run(
        [BINARY, "serve", "--port", "0", "--transport", "nixl", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert result.returncode == 2, result.stderr
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    return lines[0]


def test_a_missing_library_is_one_line(monkeypatch):
    monkeypatch.setenv("CORELLA_NIXL_LIBRARY", "/nowhere/libnixl_capi.so")
    line = refusal("--role", "decode")
    assert "/nowhere/libnixl_capi.so" in line
    assert "pip install" in line and "CORELLA_NIXL_LIBRARY" in line
    monkeypatch.delenv("CORELLA_NIXL_LIBRARY")
    line = refusal("--role", "decode")
    assert "libnixl_capi.so" in line


def test_certificates_and_nixl_exclude_each_other(tmp_path):
    files = ("--cluster-tls-cert", "--cluster-tls-key", "--cluster-tls-ca")
    options = [word for option in files for word in (option, tmp_path / "any.pem")]
    line = refusal("--role", "decode", *options)
    assert "--transport nixl does not encrypt" in line


def test_missing_plugins_are_told(monkeypatch, tmp_path):
    monkeypatch.setenv("NIXL_PLUGIN_DIR", str(tmp_path))
    result = subprocess.run(
        [BINARY, "serve", "--port", "0", "--role", "decode", *map(str, BY_NIXL)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert result.returncode == 2, result.stderr
    assert "NIXL_PLUGIN_DIR" in result.stderr.strip().splitlines()[-1]
