"""Tests decode nodes that are short of KV pages: requests wait in host memory, or return to their prefill node."""

import concurrent.futures

import pytest
from fleet import ROW_BYTES, SLOW, Fleet, num_remote_tokens, num_steps, wait_at_rest, wait_for_decode_nodes
from server_process import ServerProcess
from test_role import change

PAGE_BYTES = 16 * ROW_BYTES
# A request begins with 3 pages and ends with 13, so that all requests fit only at first. The length of an answer is
# unknown, and with a share of 0 every request begins whose prompt fits.
NUM_PAGES = 26
CONTEXT = ("--max-model-len", 200)
SMALL = ("--kv-cache-memory", NUM_PAGES * PAGE_BYTES, "--head-room", 0)
THINGS = ["fox", "lantern", "river", "clock", "garden", "bridge"]


def answer(server, index):
    """Returns everything that a client receives, and the number of tokens."""
    place = f"a {THINGS[index]} and a mill by the sea"
    question = f"Tell me a long story about {place}, and tell me what the people of the village said about it."
    answer = server.client.chat.completions.create(
        model=server.model(),
        messages=[{"role": "user", "content": question}],
        temperature=index % 2,
        seed=index,
        logprobs=True,
        extra_body={"ignore_eos": True},
    )
    (choice,) = answer.choices
    assert choice.finish_reason == "length"
    assert 33 <= answer.usage.prompt_tokens <= 48, "it has three pages"
    return choice.message.content, choice.logprobs.model_dump(), answer.usage.completion_tokens


def answers(server):
    """Returns the results of concurrent clients."""
    with concurrent.futures.ThreadPoolExecutor(len(THINGS)) as pool:
        with server.held_with_requests(len(THINGS)):
            asked = [pool.submit(answer, server, index) for index in range(len(THINGS))]
        return [answer.result() for answer in asked]


@pytest.fixture(scope="module")
def expected():
    with ServerProcess(*SLOW, *CONTEXT) as alone:
        return answers(alone)


def num_tokens_after_the_first(expected):
    return sum(num_tokens - 1 for _, _, num_tokens in expected)


def counts(decode):
    names = ("corella_kv_spills_total", "corella_kv_restores_total", "corella_requests_handed_back_total")
    return [decode.metric(name) for name in names]


def test_requests_wait_in_host_memory_and_go_on_where_they_were(expected):
    with Fleet() as fleet:
        memory = ("--kv-spill-memory", 13 * len(THINGS) * PAGE_BYTES)
        decode = fleet.decode(*SLOW, *CONTEXT, *SMALL, *memory)
        prefill = fleet.prefill(*SLOW, *CONTEXT)
        assert answers(prefill) == expected
        num_spills, num_restores, num_handed_back = counts(decode)
        assert num_spills > 0
        assert num_restores == num_spills
        assert num_handed_back == 0
        assert num_remote_tokens(prefill) == num_tokens_after_the_first(expected)
        wait_at_rest(prefill, decode)


# No memory at all, and less than any request needs.
@pytest.mark.parametrize("num_bytes", [0, 2 * PAGE_BYTES])
def test_a_request_that_host_memory_has_no_room_for_goes_back(expected, num_bytes):
    with Fleet() as fleet:
        memory = ("--kv-spill-memory", num_bytes)
        decode = fleet.decode(*SLOW, *CONTEXT, *SMALL, *memory)
        prefill = fleet.prefill(*SLOW, *CONTEXT)
        assert answers(prefill) == expected
        num_spills, _, num_handed_back = counts(decode)
        assert num_spills == 0
        assert num_handed_back > 0
        assert 0 < num_remote_tokens(prefill) < num_tokens_after_the_first(expected)
        assert num_steps(prefill) > len(THINGS), "it has written the rest"
        wait_at_rest(prefill, decode)


def test_a_node_that_becomes_a_decode_node_has_host_memory(expected):
    with Fleet() as fleet:
        decode = fleet.node("unified", *SLOW, *CONTEXT, *SMALL)
        change(decode, "decode")
        prefill = fleet.node("prefill", *SLOW, *CONTEXT)
        wait_for_decode_nodes(prefill, 1)
        assert answers(prefill) == expected
        num_spills, num_restores, _ = counts(decode)
        # A quarter of the node's pages holds one request that has not grown much.
        assert num_spills > 0
        assert num_restores == num_spills
        wait_at_rest(prefill, decode)
