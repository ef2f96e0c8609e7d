"""Tests nodes that fetch each other's cached blocks: same answers as one process, and the loss of a node."""

import concurrent.futures
import itertools
import json

import pytest
import wander
from fleet import THREADS
from pairing_proxy import post
from patience import held, wait_until
from server_process import ServerProcess, free_port
from tcp_proxy import TcpProxy
from wander import site_of

NODE = ("--cluster-listen", "127.0.0.1:0", *THREADS)
FETCH = ("--block-fetch", "always")
# Number of compared turns of conversations. `wander.py` plays more.
NUM_REQUESTS = 40


def answer(server, prompt, site=None, **options):
    """Returns the tokens of an answer, and the number of cached prompt tokens."""
    body = {"prompt": prompt, "ignore_eos": True, "return_token_ids": True, **options}
    if site:
        body["kv_transfer_params"] = {"cached_blocks": site}
    status, _, text = post(server.port, "/v1/completions", body)
    assert status == 200, text
    fields = json.loads(text)
    cached = fields["usage"].get("prompt_tokens_details") or {}
    return fields["choices"][0]["token_ids"], cached.get("cached_tokens", 0)


def num_loads(server, outcome):
    return server.metric("corella_block_loads_total", outcome=outcome)


@pytest.fixture(scope="module", params=list(wander.MODELS))
def asked(request):
    """Yields a model, the arguments of its nodes, and conversations with the answers of one process."""
    model = wander.MODELS[request.param]
    with wander.answered(model, NUM_REQUESTS) as (arguments, talks):
        yield model, arguments, talks


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_wandering_conversations_say_what_they_say_on_one_node(asked, transport):
    model, arguments, talks = asked
    report = wander.wander("unified", model, transport, arguments, talks)
    assert report.differences == []
    assert report.num_blocks["unified from unified"] > 10, "turns brought their conversations along"


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_conversations_that_wander_over_pairs_say_what_they_say_on_one_node(asked, transport):
    model, arguments, talks = asked
    report = wander.wander("pairs", model, transport, arguments, talks)
    assert report.differences == []
    assert report.num_blocks["prefill from decode"] > 0, "answers of decode nodes were not computed again"
    assert report.num_blocks["prefill from prefill"] > 0


def test_50_a_hint_to_a_node_with_other_weights_changes_no_answer():
    """Any caller may name such a node, whose rows all callers would find."""
    options = {"max_tokens": 12, "temperature": 0, "logprobs": 3}
    prompt = [300 + at * 37 % 1500 for at in range(160)]

    def asked(server, site=None):
        body = {"prompt": prompt, "ignore_eos": True, "return_token_ids": True, **options}
        if site:
            body["kv_transfer_params"] = {"cached_blocks": site}
        status, _, text = post(server.port, "/v1/completions", body)
        assert status == 200, text
        choice = json.loads(text)["choices"][0]
        return choice["token_ids"], choice["logprobs"]["token_logprobs"]

    for dtype in ("int8", "int4"):
        with ServerProcess(*NODE, *FETCH) as node, ServerProcess(*NODE, *FETCH, "--dtype", dtype) as other:
            expected = asked(node)
            assert asked(other) != expected, "the weights show"
            status, _, _ = post(node.port, "/reset_prefix_cache", {})
            assert status == 200
            assert asked(node, site_of(other)) == expected
            assert asked(node) == expected, "what the other has computed was not cached"
            assert node.metric("corella_block_fetches_total", outcome="failed") == 1
            assert "no cached blocks come from" in node.log() and "--dtype" in node.log()


def test_a_turn_computes_only_what_no_node_has():
    options = {"max_tokens": 4, "temperature": 0}
    beginnings = itertools.count(300)
    with ServerProcess(*NODE, *FETCH) as first, ServerProcess(*NODE, *FETCH) as second:
        site = site_of(first)

        def is_brought():
            prompt = [next(beginnings), *(400 + at % 50 for at in range(159))]
            tokens, _ = answer(first, prompt, max_tokens=17, temperature=0)
            turn = prompt + tokens + [500, 501]
            expected, cached = answer(first, turn, **options)
            assert cached == 176
            there = answer(second, turn, site, **options)
            assert there[0] == expected
            return there[1] == cached

        # A busy machine may answer a lookup too late. The next conversation is requested then.
        wait_until(is_brought, "the second node has brought a conversation")
        assert num_loads(second, "loaded") >= 1
        num_failed = second.metric("corella_block_fetches_total", outcome="failed")
        # A node that is not allowed, a silent node, and a node that is no longer there.
        assert first.process.poll() is None
        other = [600 + at for at in range(64)]
        lone, _ = answer(first, other, **options)
        far = {"host": "10.0.0.6", "port": 9}
        assert answer(second, other, far, **options)[0] == lone
        with held(first.process):
            changed = [601, *other[1:]]
            answer(second, changed, site, **options)
        first.kill()
        changed = [602, *other[1:]]
        answer(second, changed, site, **options)
        assert second.metric("corella_block_fetches_total", outcome="failed") - num_failed == 3
        status, _, text = post(
            second.port,
            "/v1/completions",
            {"prompt": other, "kv_transfer_params": {"cached_blocks": "10.0.0.6:9"}},
        )
        assert status == 400 and b"cached_blocks" in text


def test_a_source_that_dies_in_the_middle_of_a_load_costs_a_prompt_and_nothing_else():
    options = {"max_tokens": 8, "temperature": 0}
    with ServerProcess(*NODE, *FETCH, "--transport", "tcp") as first, ServerProcess(
        *NODE, *FETCH, "--transport", "tcp"
    ) as second:
        site = site_of(first)
        port = free_port()
        with TcpProxy(("127.0.0.1", port), ("127.0.0.1", site["port"])) as proxy:
            slow = {"host": "127.0.0.1", "port": port}
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                # A busy machine may be too late for a lookup. The next prompt is requested then.
                for seed in itertools.count(400):
                    prompt = [seed + at % 97 for at in range(1200)]
                    expected, _ = answer(first, prompt, **options)
                    proxy.hold_after(400_000)
                    answering = pool.submit(answer, second, prompt, slow, **options)
                    wait_until(lambda: proxy.is_held or answering.done(), "the load is in the middle")
                    if proxy.is_held:
                        break
                    assert answering.result()[0] == expected
                first.kill()
                proxy.cut()
                assert answering.result()[0] == expected
        second.wait_until(lambda: num_loads(second, "failed") >= 1, "the load has failed")
        second.wait_until(lambda: second.metric("corella_kv_pages_in_use") == 0, "nothing is in use")
        assert answer(second, prompt, **options)[0] == expected
