"""Tests decode nodes that are short of KV pages: requests wait in host memory, or go back where they came from."""

import concurrent.futures

import pytest
from fleet import (
    ROW_BYTES,
    SLOW,
    Fleet,
    complete,
    num_remote_tokens,
    num_steps,
    prompt_of,
    wait_at_rest,
    wait_for_decode_nodes,
)
from server_process import ServerProcess
from test_role import change

PAGE_BYTES = 16 * ROW_BYTES
# A request begins with 3 pages and ends with 10, so that 6 of them fit only at first. The share of 0 lets
# everybody begin whose prompt fits.
NUM_PAGES = 26
NUM_REQUESTS = 6
NUM_TOKENS = 120
SMALL = ("--kv-cache-memory", NUM_PAGES * PAGE_BYTES, "--max-model-len", 200, "--head-room", 0)
PROMPTS = [prompt_of(40, seed) for seed in range(NUM_REQUESTS)]
OPTIONS = [
    {"temperature": seed % 2, "seed": seed, "logprobs": 2, "extra_body": {"ignore_eos": True}}
    for seed in range(NUM_REQUESTS)
]


def ask_all(server):
    """Returns what clients are told who all ask at once."""
    with concurrent.futures.ThreadPoolExecutor(NUM_REQUESTS) as pool:
        answers = [
            pool.submit(complete, server, prompt, max_tokens=NUM_TOKENS, **options)
            for prompt, options in zip(PROMPTS, OPTIONS)
        ]
        return [answer.result() for answer in answers]


@pytest.fixture(scope="module")
def expected():
    with ServerProcess(*SLOW) as alone:
        return ask_all(alone)


def counts(decode):
    names = ("corella_kv_spills_total", "corella_kv_restores_total", "corella_requests_handed_back_total")
    return [decode.metric(name) for name in names]


def test_requests_wait_in_host_memory_and_go_on_where_they_were(expected):
    with Fleet() as fleet:
        decode = fleet.decode(*SLOW, *SMALL, "--kv-spill-memory", 10 * NUM_REQUESTS * PAGE_BYTES)
        prefill = fleet.prefill(*SLOW)
        assert ask_all(prefill) == expected
        num_spills, num_restores, num_handed_back = counts(decode)
        assert num_spills > 0
        assert num_restores == num_spills
        assert num_handed_back == 0
        assert num_remote_tokens(prefill) == NUM_REQUESTS * (NUM_TOKENS - 1)
        wait_at_rest(prefill, decode)


def test_a_request_that_host_memory_has_no_room_for_goes_back(expected):
    with Fleet() as fleet:
        # Too little for any request that has begun.
        decode = fleet.decode(*SLOW, *SMALL, "--kv-spill-memory", 2 * PAGE_BYTES)
        prefill = fleet.prefill(*SLOW)
        assert ask_all(prefill) == expected
        num_spills, _, num_handed_back = counts(decode)
        assert num_spills == 0
        assert num_handed_back > 0
        num_remote = num_remote_tokens(prefill)
        assert 0 < num_remote < NUM_REQUESTS * (NUM_TOKENS - 1)
        assert num_steps(prefill) > NUM_REQUESTS, "it has written the rest"
        wait_at_rest(prefill, decode)


def test_a_node_that_becomes_a_decode_node_has_host_memory_for_it(expected):
    with Fleet() as fleet:
        decode = fleet.node("unified", *SLOW, *SMALL)
        change(decode, "decode")
        prefill = fleet.node("prefill", *SLOW)
        wait_for_decode_nodes(prefill, 1)
        assert ask_all(prefill) == expected
        num_spills, num_restores, _ = counts(decode)
        # A quarter of its pages holds one request at a time.
        assert num_spills > 0
        assert num_restores == num_spills
        wait_at_rest(prefill, decode)
