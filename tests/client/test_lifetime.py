"""Tests full queues, clients that leave, signals and restarts."""

import concurrent.futures
import ctypes
import json
import os
import re
import signal
import socket
import urllib.request

import openai
import pytest
from fleet import ask
from patience import PATIENCE_S
from server_process import ServerProcess

LONG = {"max_tokens": 1500, "temperature": 0, "extra_body": {"ignore_eos": True}}
# Portable kernels take seconds for a long request, so that it still runs when the test looks.
SLOW = ("--isa", "portable", "--threads", 1)


def stream_long(server, **options):
    return server.client.completions.create(
        model=server.model(), prompt=[40, 41, 42], stream=True, **(LONG | options)
    )


def num_running(server):
    return server.metric("corella_num_requests_running")


def num_waiting(server):
    return server.metric("corella_num_requests_waiting")


def num_unanswered(server):
    with urllib.request.urlopen(server.base_url + "/load", timeout=PATIENCE_S) as response:
        return json.load(response)["server_load"]


def test_full_queue_is_429():
    with ServerProcess("--max-num-seqs", 1, "--max-queued-requests", 1, *SLOW) as server:
        running = stream_long(server)
        next(running)
        with concurrent.futures.ThreadPoolExecutor() as pool:
            waiting = pool.submit(stream_long, server, max_tokens=4)
            server.wait_until(lambda: num_waiting(server) == 1, "the second request waits")
            with pytest.raises(openai.RateLimitError) as error:
                stream_long(server)
            assert int(error.value.response.headers["retry-after"]) >= 1
            running.close()
            assert len(list(waiting.result())) > 0


def test_a_waiting_client_that_leaves_frees_its_place():
    with ServerProcess("--max-num-seqs", 1, "--max-queued-requests", 1, *SLOW) as server:
        running = stream_long(server)
        next(running)
        with ask(server, [50], 1500):
            server.wait_until(lambda: num_waiting(server) == 1, "the second request waits")
        server.wait_until(lambda: num_waiting(server) == 0, "the place is free")
        assert num_running(server) == 1
        running.close()


def test_disconnect_is_499():
    with ServerProcess(*SLOW) as server:
        stream = stream_long(server)
        next(stream)
        assert num_running(server) == 1
        stream.close()
        server.wait_until(lambda: num_running(server) == 0, "the request is aborted")
        server.wait_until(
            lambda: server.metric("corella_http_requests_total", status="499") == 1,
            "the disconnect is counted",
        )
        assert server.metric("corella_request_success_total", finished_reason="length") == 0


def test_sigterm_finishes_what_runs():
    with ServerProcess() as server:
        stream = stream_long(server, max_tokens=400)
        chunks = [next(stream)]
        server.terminate()
        server.wait_until(lambda: server.status_of("/ready") != 200, "it is not ready")
        with pytest.raises((openai.APIConnectionError, openai.InternalServerError)) as refused:
            server.client.completions.create(model="any", prompt=[40], max_tokens=1)
        if isinstance(refused.value, openai.InternalServerError):
            assert refused.value.status_code == 503
        chunks += stream
        assert chunks[-1].choices[0].finish_reason == "length"
        assert server.wait() == 0


def test_a_stream_that_is_cut_off_says_so():
    with ServerProcess(*SLOW) as server:
        stream = stream_long(server)
        next(stream)
        server.terminate()
        server.wait_until(lambda: server.status_of("/ready") != 200, "it drains")
        # After a second signal, the server waits no longer.
        server.terminate()
        with pytest.raises(openai.APIError) as cut_off:
            for chunk in stream:
                assert chunk.choices[0].finish_reason is None
        assert "shutting down" in cut_off.value.message
        assert server.wait() == 0
        (line,) = [line for line in server.log().splitlines() if " answered " in line and "finish=" in line]
        line = re.sub(r"\x1b\[\d*m", "", line)
        assert 'status=200 error="' in line and 'finish="error"' in line
        assert cut_off.value.message in line


def test_a_client_that_still_sends_does_not_hold_up_the_end():
    with ServerProcess() as server:
        with socket.create_connection(("127.0.0.1", server.port)) as sending:
            head = b"POST /v1/completions HTTP/1.1\r\nhost: test\r\ncontent-length: 1000\r\n\r\n"
            sending.sendall(head + b'{"prompt": "')
            server.wait_until(lambda: num_unanswered(server) == 1, "the server has read the head")
            server.terminate()
            assert server.wait() == 0
            assert b"503 Service Unavailable" in sending.recv(4096)


def test_a_lost_engine_ends_the_process(monkeypatch):
    """A thread of the executor is held, like by a debugger, so that a step never returns."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long] * 4
    attach, detach, wait_for_any_child = 16, 17, 0x40000000
    with ServerProcess("--threads", 2, "--step-deadline", 1) as server:
        stream = stream_long(server)
        next(stream)
        (stage,) = server.threads("corella-stage-0")
        if libc.ptrace(attach, stage, 0, 0) != 0:
            pytest.skip("this machine allows no debugger")
        try:
            # The watchdog checks every 30 seconds, and clients get a second to read their error.
            with pytest.raises(openai.APIError):
                list(stream)
        finally:
            if libc.ptrace(detach, stage, 0, 0) != 0:
                # The process has ended, and stays until the debugger has seen the end of this thread.
                os.waitpid(stage, wait_for_any_child)
        assert server.wait() == 2
        assert "error: serving on" in server.log()


def test_sigterm_when_idle():
    with ServerProcess() as server:
        server.terminate()
        assert server.wait() == 0


def test_sigint_is_like_sigterm():
    with ServerProcess() as server:
        server.process.send_signal(signal.SIGINT)
        assert server.wait() == 0


def test_kill_and_restart_on_the_same_port():
    with ServerProcess() as server:
        stream = stream_long(server)
        next(stream)
        server.process.kill()
        server.wait()
        stream.close()
    with ServerProcess(port=server.port) as server:
        assert next(stream_long(server)).choices
