"""Objectives and lengths of prompts choose the node that decodes."""

import openai
import pytest
from fleet import THREADS, Fleet, complete, num_steps, prompt_of

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
