"""Tests roles that change while requests are served."""

import concurrent.futures
import contextlib
import json
import tempfile
import threading
import urllib.error
import urllib.request

from patience import PATIENCE_S, slowed
from server_process import ServerProcess
from test_lifetime import SLOW
from fleet import THREADS, complete, node, num_steps, wait_for_decode_nodes

OPTIONS = {"max_tokens": 12, "temperature": 1, "seed": 7}


def ask(server, role=None):
    """Gets or changes the role; returns the status and the answer."""
    body = None if role is None else json.dumps({"role": role}).encode()
    request = urllib.request.Request(server.base_url + "/role", body)
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
            answer = json.load(response)
            # The source of cached blocks has tests of its own.
            answer.pop("cached_blocks", None)
            return response.status, answer
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)["error"]


def change(server, role):
    assert ask(server, role) == (200, {"role": role, "changing_to": None})


def test_what_cannot_be_a_role_is_refused():
    with ServerProcess(*THREADS) as server:
        assert ask(server) == (200, {"role": "unified", "changing_to": None})
        for role in ("Prefill", "", 5):
            status, error = ask(server, role)
            assert (status, error["param"]) == (400, "role")
        status, error = ask(server, "prefill")
        assert status == 409 and "--registry" in error["message"]
        assert ask(server) == (200, {"role": "unified", "changing_to": None})
        change(server, "unified")


def test_no_request_fails_while_roles_change():
    prompts = [list(range(300 + i, 340 + 2 * i)) for i in range(8)]
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        registry = f"file:{folder}"
        alone = stack.enter_context(ServerProcess(*THREADS))
        expected = [complete(alone, prompt, **OPTIONS) for prompt in prompts]
        first = stack.enter_context(node("unified", registry, *THREADS))
        second = stack.enter_context(node("decode", registry, *THREADS))
        is_over = threading.Event()

        def load(server):
            num_answers = 0
            while not is_over.is_set():
                at = num_answers % len(prompts)
                assert complete(server, prompts[at], **OPTIONS) == expected[at]
                num_answers += 1
            return num_answers

        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            loads = [pool.submit(load, server) for server in (first, second) for _ in range(2)]
            try:
                change(first, "prefill")
                wait_for_decode_nodes(first, 1)
                first.wait_until(
                    lambda: first.metric("corella_remote_tokens_total") > 0, "tokens come back"
                )
                # The nodes exchange roles.
                change(first, "decode")
                change(second, "prefill")
                wait_for_decode_nodes(second, 1)
                second.wait_until(
                    lambda: second.metric("corella_remote_tokens_total") > 0, "tokens come back"
                )
                change(first, "unified")
                change(second, "unified")
            finally:
                is_over.set()
            assert all(load.result() > 0 for load in loads)


def test_a_role_ends_what_it_owes_before_the_next_begins():
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        registry = f"file:{folder}"
        decode = stack.enter_context(node("decode", registry, *SLOW))
        prefill = stack.enter_context(node("prefill", registry, *SLOW))
        wait_for_decode_nodes(prefill, 1)
        stream = prefill.client.completions.create(
            model=prefill.model(),
            prompt=[400, 401, 402],
            stream=True,
            max_tokens=300,
            temperature=0,
            extra_body={"ignore_eos": True},
        )
        next(stream)
        with concurrent.futures.ThreadPoolExecutor() as pool:
            # Otherwise the change ends before the test sees it.
            with slowed(decode):
                changing = pool.submit(ask, decode, "unified")
                decode.wait_until(
                    lambda: ask(decode) == (200, {"role": "decode", "changing_to": "unified"}),
                    "the change is under way",
                )
                status, error = ask(decode, "prefill")
                assert status == 409 and "unified" in error["message"]
            before = num_steps(prefill)
            assert list(stream)[-1].choices[0].finish_reason == "length"
            assert num_steps(prefill) - before < 100, "the decode node has finished it"
            assert changing.result() == (200, {"role": "unified", "changing_to": None})
        wait_for_decode_nodes(prefill, 0)
        assert complete(prefill, [400, 401], max_tokens=3)[0][1] == "length"
