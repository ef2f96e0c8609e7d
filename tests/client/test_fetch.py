"""Tests nodes that fetch each other's cached blocks: same answers as one process, and what happens when one goes."""

import concurrent.futures
import contextlib
import json
import random
import urllib.request

import pytest
from fleet import Fleet, wait_at_rest
from pairing_proxy import post
from patience import PATIENCE_S, held, wait_until
from server_process import ServerProcess, free_port
from tcp_proxy import TcpProxy

THREADS = ("--threads", 1)
NODE = ("--cluster-listen", "127.0.0.1:0", *THREADS)
FETCH = ("--block-fetch", "always")
NUM_TALKS = 4
NUM_TURNS = 4


def site_of(server):
    """What a request says of a node to have its blocks fetched from there."""
    with urllib.request.urlopen(server.base_url + "/role", timeout=PATIENCE_S) as role:
        return json.load(role)["cached_blocks"]


def answer(server, prompt, site=None, **options):
    """The tokens of an answer, and how many of the prompt's were cached."""
    body = {"prompt": prompt, "ignore_eos": True, "return_token_ids": True, **options}
    if site:
        body["kv_transfer_params"] = {"cached_blocks": site}
    status, _, text = post(server.port, "/v1/completions", body)
    assert status == 200, text
    fields = json.loads(text)
    cached = fields["usage"].get("prompt_tokens_details") or {}
    return fields["choices"][0]["token_ids"], cached.get("cached_tokens", 0)


def talks(seed):
    """Conversations: for each turn the new tokens and the options of its answer. Some begin alike."""
    draw = random.Random(seed)
    start = [400 + at % 50 for at in range(100)]
    for talk in range(NUM_TALKS):
        turns = []
        for turn in range(NUM_TURNS):
            new = [draw.randrange(300, 2000) for _ in range(draw.randrange(1, 60))]
            if turn == 0 and talk % 2:
                new = start + new
            greedy = {"temperature": 0}
            seeded = {"temperature": 1.0, "seed": draw.randrange(1000)}
            turns.append((new, {"max_tokens": draw.randrange(1, 40), **draw.choice([greedy, seeded])}))
        yield turns


def wander(talk, number, choose):
    """Plays a conversation: `choose` says which node has a turn, and whose blocks it is told of."""
    prompt, answers = [], []
    draw = random.Random(number)
    last = None
    for new, options in talk:
        prompt = prompt + new
        server, site = choose(draw, last)
        tokens, _ = answer(server, prompt, site, **options)
        answers.append(tokens)
        prompt = prompt + tokens
        last = server
    return answers


def num_loads(server, outcome):
    return server.metric("corella_block_loads_total", outcome=outcome)


def compare(choose, alone):
    asked = list(talks(seed=3))
    with concurrent.futures.ThreadPoolExecutor(NUM_TALKS) as pool:
        expected = [pool.submit(wander, talk, at, lambda *_: (alone, None)) for at, talk in enumerate(asked)]
        answers = [pool.submit(wander, talk, at, choose) for at, talk in enumerate(asked)]
        for at, (lone, there) in enumerate(zip(expected, answers)):
            assert there.result() == lone.result(), at


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_wandering_conversations_say_what_they_say_on_one_node(transport):
    with contextlib.ExitStack() as stack:
        start = lambda *arguments: stack.enter_context(ServerProcess(*arguments))
        nodes = [start(*NODE, *FETCH, "--transport", transport) for _ in range(3)]
        sites = {node: site_of(node) for node in nodes}

        def choose(draw, last):
            server = draw.choice([node for node in nodes if node is not last])
            return server, sites.get(last)

        compare(choose, start(*THREADS))
        num_blocks = sum(node.metric("corella_fetched_blocks_total") for node in nodes)
        assert num_blocks > 10, "turns brought their conversations along"
        for node in nodes:
            node.wait_until(lambda: node.metric("corella_kv_pages_in_use") == 0, "nothing is in use")


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_a_prefill_node_brings_the_last_turn_back_from_its_decode_node(transport):
    cluster = ("--transport", transport, *THREADS, *FETCH)
    with Fleet() as fleet:
        alone = fleet.enter_context(ServerProcess(*THREADS))
        decode = [fleet.decode(*cluster) for _ in range(2)]
        prefill = [fleet.prefill(*cluster, num_decode_nodes=2) for _ in range(2)]
        compare(lambda draw, last: (last or draw.choice(prefill), None), alone)
        num_blocks = sum(node.metric("corella_fetched_blocks_total") for node in prefill)
        assert num_blocks > 5, "answers of decode nodes were not computed again"
        wait_at_rest(*prefill, *decode)


def test_a_turn_computes_only_what_no_node_has():
    prompt = [400 + at % 50 for at in range(160)]
    with ServerProcess(*NODE, *FETCH) as first, ServerProcess(*NODE, *FETCH) as second:
        tokens, _ = answer(first, prompt, max_tokens=17, temperature=0)
        turn = prompt + tokens + [500, 501]
        options = {"max_tokens": 4, "temperature": 0}
        expected, cached = answer(first, turn, **options)
        assert cached == 176
        site = site_of(first)
        assert answer(second, turn, site, **options) == (expected, cached)
        assert num_loads(second, "loaded") == 1
        # A node that is not allowed, one that says nothing, and one that is no longer there.
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
        assert second.metric("corella_block_fetches_total", outcome="failed") == 3
        status, _, text = post(
            second.port,
            "/v1/completions",
            {"prompt": other, "kv_transfer_params": {"cached_blocks": "10.0.0.6:9"}},
        )
        assert status == 400 and b"cached_blocks" in text


def test_a_source_that_dies_in_the_middle_of_a_load_costs_a_prompt_and_nothing_else():
    prompt = [400 + at % 97 for at in range(1200)]
    options = {"max_tokens": 8, "temperature": 0}
    with ServerProcess(*NODE, *FETCH, "--transport", "tcp") as first, ServerProcess(
        *NODE, *FETCH, "--transport", "tcp"
    ) as second:
        expected, _ = answer(first, prompt, **options)
        site = site_of(first)
        port = free_port()
        with TcpProxy(("127.0.0.1", port), ("127.0.0.1", site["port"])) as proxy:
            proxy.hold_after(400_000)
            slow = {"host": "127.0.0.1", "port": port}
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                answering = pool.submit(answer, second, prompt, slow, **options)
                wait_until(lambda: proxy.is_held, "the load is in the middle")
                first.kill()
                proxy.cut()
                assert answering.result()[0] == expected
        second.wait_until(lambda: num_loads(second, "failed") == 1, "the load has failed")
        second.wait_until(lambda: second.metric("corella_kv_pages_in_use") == 0, "nothing is in use")
        assert answer(second, prompt, **options)[0] == expected
