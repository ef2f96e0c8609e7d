"""What vLLM's `LLM` has besides answers: its scripts run with another import."""

import asyncio
import io
import sys

import pytest
from corella import RequestError, SamplingParams, UnsupportedError
from corella.progress import progress_bar
from patience import wait_until

ENDLESS = SamplingParams(max_tokens=1900, seed=1, ignore_eos=True)


def test_the_prefix_cache_is_reset_unless_requests_run(llm):
    prompt = "A prefix of its own, to be forgotten, " * 8
    params = SamplingParams(max_tokens=1, temperature=0)
    cached = lambda: llm.generate(prompt, params)[0].num_cached_tokens
    cached()
    assert cached() > 0
    stream = llm.stream("Once", ENDLESS)
    next(stream)
    assert llm.reset_prefix_cache() is False
    stream.close()
    # A step that runs without the request still has its pages.
    wait_until(lambda: llm.reset_prefix_cache() is True, "its pages are free")
    assert cached() == 0


def test_a_clone_is_independent_of_its_original():
    params = SamplingParams(temperature=0.5, stop=["a"], logit_bias={1: 2.0}, structured_outputs={"choice": ["x"]})
    clone = params.clone()
    assert clone == params and clone is not params
    clone.temperature = 1.0
    clone.stop.append("b")
    clone.logit_bias[7] = 1.0
    clone.structured_outputs["choice"].append("y")
    assert params.to_fields() == {
        "temperature": 0.5,
        "stop": ["a"],
        "logit_bias": {"1": 2.0},
        "structured_outputs": {"choice": ["x"]},
    }


def test_beam_search_is_refused_with_what_to_do_instead(llm):
    with pytest.raises(UnsupportedError, match="best_of=M") as refused:
        llm.beam_search(["Once"], object())
    assert isinstance(refused.value, NotImplementedError)


def test_fields_that_are_none_are_not_given(llm):
    params = SamplingParams(max_tokens=2, temperature=0)
    expected = llm.generate("Once", params)[0].outputs
    assert llm.generate("Once", params, lora_request=None)[0].outputs == expected
    with pytest.raises(RequestError, match="lora_request"):
        llm.generate("Once", params, lora_request="x")


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def no_tqdm(monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)


def test_a_terminal_shows_a_bar_without_tqdm(llm, monkeypatch, no_tqdm):
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    llm.generate(["a", "b", "c"], SamplingParams(max_tokens=2), use_tqdm=True)
    first, *_, last = screen.getvalue().split("\r")
    assert first.startswith("Processed prompts:   0% |                    | 0/3 ")
    assert last.startswith("Processed prompts: 100% |####################| 3/3 ") and last.endswith("\n")


def test_a_file_gets_the_end_of_the_bar_alone(monkeypatch, no_tqdm):
    file = io.StringIO()
    monkeypatch.setattr(sys, "stderr", file)
    with pytest.raises(KeyError), progress_bar(True, 4) as advance:
        advance()
        raise KeyError
    assert file.getvalue().startswith("Processed prompts:  25% |#####               | 1/4 ")
    assert file.getvalue().count("\n") == 1 and "\r" not in file.getvalue()
    monkeypatch.setattr(sys, "stderr", None)
    with progress_bar(True, 1) as advance:
        advance()


def test_awaited_calls_have_a_bar(llm):
    counted = []

    class Bar:
        def __init__(self, total, desc):
            self.total, self.done = total, 0

        def update(self, number):
            self.done += number

        def close(self):
            counted.append((self.total, self.done))

    async def ask():
        params = SamplingParams(max_tokens=2)
        question = [{"role": "user", "content": "Hello!"}]
        await llm.agenerate(["a", "b", "c"], params, use_tqdm=Bar)
        await llm.achat([question, question], params, use_tqdm=Bar)

    asyncio.run(ask())
    assert counted == [(3, 3), (2, 2)]
