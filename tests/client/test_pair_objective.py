"""Objectives and lengths of prompts choose the node that decodes."""

import openai
import pytest
from fleet import (
    NO_MARKS,
    ROW_BYTES,
    SLOW as PORTABLE,
    THREADS,
    Fleet,
    complete,
    num_decode_nodes,
    num_steps,
    prompt_of,
    reported_free_pages,
)
from patience import wait_until
from server_process import free_port

# A token takes 20 ms, however fast the machine is.
SLOW = ("--device", "mock", "--mock-step-us", 20_000)


def test_an_objective_that_the_decode_node_misses_is_refused_and_a_longer_one_holds():
    with Fleet() as fleet:
        decode = fleet.decode(*SLOW)
        prefill = fleet.prefill(*SLOW, "--slo-admission", "--fallback", "none")

        def ask(objective_ms, **options):
            return prefill.client.completions.create(
                model=prefill.model(), prompt=prompt_of(20), extra_body={"tpot_slo_ms": objective_ms, "ignore_eos": True}, **options
            )

        # As long as nothing is decoded, nothing says how long a token takes.
        chunks = ask(1, max_tokens=1500, stream=True)
        for _ in range(4):
            next(chunks)
        for stream in (False, True):
            with pytest.raises(openai.RateLimitError) as error:
                ask(1, max_tokens=4, stream=stream)
            assert "each further token would take" in error.value.message
            assert "1 ms were asked for" in error.value.message
        assert ask(60_000, max_tokens=2).usage.completion_tokens == 2
        next(chunks)
        chunks.close()
        assert num_steps(decode) > 0


def test_a_decode_node_takes_no_longer_prompts_than_it_was_told():
    with Fleet() as fleet:
        short = fleet.decode(*THREADS, "--max-prompt-tokens", 40)
        long = fleet.decode(*THREADS)
        prefill = fleet.prefill(*THREADS, num_decode_nodes=2)
        for _ in range(3):
            complete(prefill, prompt_of(40), max_tokens=4)
        assert num_steps(short) > 0 and num_steps(long) == 0
        before = num_steps(short)
        for _ in range(3):
            complete(prefill, prompt_of(41), max_tokens=4)
        assert num_steps(short) == before and num_steps(long) > 0


def test_a_decode_node_is_asked_for_the_room_that_an_answer_is_expected_to_need():
    """Most answers end long before their limit."""
    with Fleet() as fleet:
        # The second request would fit beside the first only without its 1,900 tokens.
        pool = ("--kv-cache-memory", 128 * 16 * ROW_BYTES, "--max-model-len", 2048)
        fleet.decode(*PORTABLE, *pool)
        prefill = fleet.prefill(*PORTABLE, "--fallback", "none")

        def start(max_tokens, ignore_eos):
            chunks = prefill.client.completions.create(
                model=prefill.model(),
                prompt=prompt_of(100, max_tokens),
                max_tokens=max_tokens,
                stream=True,
                logit_bias=NO_MARKS if ignore_eos else {},
                extra_body={"ignore_eos": ignore_eos},
            )
            next(chunks)
            return chunks

        first = start(900, True)
        prefill.wait_until(lambda: reported_free_pages(prefill)[0] in range(0, 124), "the node reports the request")
        start(1900, False).close()
        next(first)
        first.close()


def test_nodes_of_one_group_work_together_in_every_kind_of_registry():
    with Fleet() as fleet:
        port = free_port()
        batch = fleet.decode(*THREADS, "--group", "batch", "--cluster-listen", f"127.0.0.1:{port}")
        prefill = fleet.prefill(*THREADS, "--group", "batch")
        complete(prefill, prompt_of(20), max_tokens=4)
        before = num_steps(batch)
        assert before > 0
        # A registry in a folder has the nodes' groups, and a list of addresses does not.
        alone = fleet.prefill(*THREADS, num_decode_nodes=0)
        with Fleet(f"static:127.0.0.1:{port}") as by_address:
            other = by_address.prefill(*THREADS, num_decode_nodes=0)
            wait_until(lambda: num_decode_nodes(other, "incompatible") == 1, "the node says its group")
            for node in (alone, other):
                complete(node, prompt_of(20), max_tokens=4)
            assert num_steps(batch) == before
            assert num_decode_nodes(alone, "incompatible") == 0
            assert other.log().count('this node has --group "" and the peer "batch"') == 1
            same = by_address.prefill(*THREADS, "--group", "batch")
            complete(same, prompt_of(20), max_tokens=4)
            assert num_steps(batch) > before
