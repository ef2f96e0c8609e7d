"""What vLLM's `LLM` has besides answers: its scripts run with another import."""

import asyncio
import io
import json
import subprocess
import sys

import pytest
from conftest import ROOT
from corella import LLM, SamplingParams, UnsupportedError
from corella.progress import progress_bar
from patience import PATIENCE_S, wait_until

ENDLESS = SamplingParams(max_tokens=1900, seed=1, ignore_eos=True)


def test_the_rank_of_a_drawn_token_is_its_place_among_all(llm):
    [output] = llm.generate("Once upon a time", SamplingParams(max_tokens=12, temperature=1.5, seed=5, logprobs=3))
    answer = output.outputs[0]
    ranks = [row[token].rank for row, token in zip(answer.logprobs, answer.token_ids)]
    assert min(ranks) >= 1 and max(ranks) > 4, "no draw is beyond the alternatives"
    at = ranks.index(max(ranks))
    context = output.prompt_token_ids + answer.token_ids[:at]
    # Each token of the vocabulary gets a log-probability as the last token of a prompt.
    tokens = range(llm.get_tokenizer().vocab_size)
    scored = llm.generate([[*context, token] for token in tokens], SamplingParams(max_tokens=0, prompt_logprobs=0))
    logprobs = [one.prompt_logprobs[-1][token].logprob for one, token in zip(scored, tokens)]
    own = logprobs[answer.token_ids[at]]
    num_before, num_equal = sum(other > own for other in logprobs), logprobs.count(own)
    assert num_before < ranks[at] <= num_before + num_equal
    for row, token in zip(answer.logprobs, answer.token_ids):
        others = [other for name, other in row.items() if name != token]
        assert [other.rank for other in others] == [place for place in range(1, 5) if place != row[token].rank][: len(others)]


def test_a_chat_and_a_stream_tell_the_same_ranks(llm):
    question = [{"role": "user", "content": "Tell me a story about a fox."}]
    params = SamplingParams(max_tokens=12, temperature=1.5, seed=5, logprobs=2)
    [chat] = llm.chat(question, params)
    stream = llm.stream(question, params)
    assert len(list(stream)) > 1
    assert stream.output.outputs[0].logprobs == chat.outputs[0].logprobs
    assert all(row[token].rank for row, token in zip(chat.outputs[0].logprobs, chat.outputs[0].token_ids))
    # A completion of the prompt's token ids draws the same tokens.
    [completion] = llm.generate([chat.prompt_token_ids], params)
    assert completion.outputs[0].logprobs == chat.outputs[0].logprobs


def check_metrics(output):
    metrics = output.metrics
    stages = [
        metrics.arrival_time,
        metrics.queued_ts,
        metrics.scheduled_ts,
        metrics.first_token_ts,
        metrics.last_token_ts,
    ]
    assert stages == sorted(stages)
    assert metrics.first_token_latency == pytest.approx(metrics.first_token_ts - metrics.arrival_time, abs=1e-4)
    assert metrics.num_generation_tokens == sum(len(choice.token_ids) for choice in output.outputs)


def test_metrics_tell_the_stages_of_a_request(llm):
    question = [{"role": "user", "content": "Hello!"}]
    params = SamplingParams(max_tokens=9, seed=1, n=3)
    for output in llm.generate(["Once", "Twice"], params) + llm.chat(question, params):
        check_metrics(output)
    [one] = llm.generate("Once", SamplingParams(max_tokens=1))
    assert one.metrics.first_token_ts == one.metrics.last_token_ts
    [none] = llm.generate("Once upon", SamplingParams(max_tokens=0, prompt_logprobs=0))
    assert none.metrics is None
    for prompt in ("Once", question):
        stream = llm.stream(prompt, params)
        next(stream)
        assert stream.output.metrics is None
        for _ in stream:
            pass
        check_metrics(stream.output)


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
    # A running step may still have the pages of the closed stream's request.
    wait_until(lambda: llm.reset_prefix_cache() is True, "its pages are free")
    assert cached() == 0


def test_default_sampling_params_are_those_of_the_models_files(llm):
    file = json.loads((ROOT / "models/nano/generation_config.json").read_text())
    expected = SamplingParams(temperature=file["temperature"], top_p=file["top_p"])
    assert llm.get_default_sampling_params() == expected
    with LLM(kv_cache_memory="16M", override_generation_config={"temperature": 0.25, "top_k": 7}) as own:
        params = own.get_default_sampling_params()
        assert params == SamplingParams(temperature=0.25, top_p=file["top_p"], top_k=7)
        # Parameters equal to the defaults change nothing.
        params.seed = params.max_tokens = 8
        assert own.generate("Once", params)[0].outputs == own.generate("Once", SamplingParams(seed=8, max_tokens=8))[0].outputs
    with LLM(kv_cache_memory="16M", generation_config="vllm") as plain:
        assert plain.get_default_sampling_params() == SamplingParams()


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
    assert llm.generate({"prompt": "Once", "multi_modal_data": None}, params)[0].outputs == expected


def test_adapters_are_refused_with_the_command_that_has_them(llm):
    with pytest.raises(UnsupportedError, match="corella serve --lora-modules"):
        llm.generate("Once", lora_request="x")


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


def test_a_script_of_vllm_runs_and_is_told_what_has_no_effect(tmp_path):
    script = ROOT / "tests/python/typed_vllm.py"
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=PATIENCE_S, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "enforce_eager has no effect: kernels and compilation have no such setting" in done.stderr
    assert "skip_mm_profiling" not in done.stderr, "a switch that is off has none anywhere"
    for name in ("gpu_memory_utilization", "max_num_seqs", "kv_cache_memory_bytes"):
        assert f"{name} has no effect" not in done.stderr, "it has one"
