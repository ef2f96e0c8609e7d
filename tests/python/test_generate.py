"""Answers of the package are those of the server, and everything about a call means the same."""

import json
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
from corella import LLM, RequestError, SamplingParams, StructuredOutputsParams
from patience import PATIENCE_S, wait_until

SUBJECTS = ["a fox", "an owl", "a bear and a lantern", "rain", "two snails"]
PROMPTS = [f"Tell me a story about {subject}." for subject in SUBJECTS]
# Greedy, seeded, and drawn by every other rule.
PARAMS = [
    SamplingParams(max_tokens=40, temperature=0),
    SamplingParams(max_tokens=40, seed=7),
    SamplingParams(
        max_tokens=30, seed=-3, n=2, temperature=0.8, top_p=0.9, top_k=20, presence_penalty=0.5, stop=["the"]
    ),
]


def ask(server, path, body):
    request = urllib.request.Request(
        server + path, json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
        return json.load(response)


def served_choices(server, path, body):
    choices = ask(server, path, {**body, "return_token_ids": True})["choices"]
    return [(choice["token_ids"], choice["finish_reason"], choice["stop_reason"]) for choice in choices]


def choices(output):
    return [(own.token_ids, own.finish_reason, own.stop_reason) for own in output.outputs]


@pytest.mark.parametrize("params", PARAMS, ids=["greedy", "seeded", "ruled"])
def test_tokens_are_those_of_the_server(llm, server, params):
    expected = [
        served_choices(server, "/v1/completions", {"prompt": prompt, **params.to_fields()}) for prompt in PROMPTS
    ]
    assert [choices(output) for output in llm.generate(PROMPTS, params)] == expected
    assert [choices(llm.generate(prompt, params)[0]) for prompt in PROMPTS] == expected
    for num_threads in (2, 8):
        with ThreadPoolExecutor(num_threads) as threads:
            many = list(threads.map(lambda prompt: choices(llm.generate(prompt, params)[0]), PROMPTS * 4))
        assert many == expected * 4


def test_a_chat_is_that_of_the_server(llm, server):
    conversation = [
        {"role": "system", "content": "You tell stories."},
        {"role": "user", "content": "Tell me a story about a fox."},
    ]
    params = SamplingParams(max_tokens=40, seed=1)
    expected = served_choices(server, "/v1/chat/completions", {"messages": conversation, **params.to_fields()})
    assert choices(llm.chat(conversation, params)[0]) == expected
    several = llm.chat([conversation, conversation[1:]], params)
    assert [len(several), choices(several[0])] == [2, expected]


def test_a_call_takes_every_kind_of_prompt(llm):
    params = SamplingParams(max_tokens=8, temperature=0)
    [of_text] = llm.generate("Once upon a time", params)
    assert of_text.prompt == "Once upon a time" and len(of_text.prompt_token_ids) > 1
    ids = of_text.prompt_token_ids
    for prompts in (ids, [ids], {"prompt": "Once upon a time"}, [{"prompt_token_ids": ids}], ("Once upon a time",)):
        [output] = llm.generate(prompts, params)
        assert output.outputs == of_text.outputs, prompts
    assert llm.generate([], params) == []


def test_each_prompt_may_have_its_own_params(llm):
    own = [SamplingParams(max_tokens=count, temperature=0) for count in (3, 5)]
    outputs = llm.generate(["Once", "Once"], own)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [3, 5]
    with pytest.raises(ValueError, match="3 prompts and 2 sampling_params"):
        llm.generate(["Once"] * 3, own)


def test_prompts_wait_where_a_server_would_refuse_them():
    params = SamplingParams(max_tokens=2, temperature=0)
    prompts = [f"{number}" for number in range(16)]
    with LLM(kv_cache_memory="16M", max_num_seqs=2, max_queued_requests=1) as narrow:
        with ThreadPoolExecutor(2) as threads:
            several = list(threads.map(lambda _: narrow.generate(prompts, params), range(2)))
    for outputs in several:
        assert [output.prompt for output in outputs] == prompts
        assert all(output.finished for output in outputs)


def test_logprobs_are_those_of_the_api(llm):
    [output] = llm.generate("Once upon", SamplingParams(max_tokens=5, temperature=0, logprobs=2, prompt_logprobs=1))
    answer = output.outputs[0]
    raw = llm.post(
        "/v1/completions", {"prompt": "Once upon", "max_tokens": 5, "temperature": 0, "logprobs": 2}
    )["choices"][0]["logprobs"]
    assert [row[token].logprob for row, token in zip(answer.logprobs, answer.token_ids)] == raw["token_logprobs"]
    assert "".join(row[token].decoded_token for row, token in zip(answer.logprobs, answer.token_ids)) == answer.text
    assert answer.cumulative_logprob == pytest.approx(sum(raw["token_logprobs"]))
    for row, token in zip(answer.logprobs, answer.token_ids):
        # A greedy draw is the most likely token, and comes first in the row.
        assert len(row) == 2 and next(iter(row)) == token == max(row, key=lambda other: row[other].logprob)
    first, *others = output.prompt_logprobs
    assert first is None and len(others) == len(output.prompt_token_ids) - 1
    for row, token in zip(others, output.prompt_token_ids[1:]):
        assert row[token].rank >= 1 and row[token].logprob <= 0

    question = [{"role": "user", "content": "Hello!"}]
    [chat] = llm.chat(question, SamplingParams(max_tokens=5, temperature=0, logprobs=2))
    answer = chat.outputs[0]
    assert [next(iter(row)) for row in answer.logprobs] == answer.token_ids


class Verdict:
    """Returns its schema like a class of Pydantic."""

    @classmethod
    def model_json_schema(cls):
        return {"enum": ["yes", "no"]}


def test_answers_obey_a_format(llm):
    params = SamplingParams(max_tokens=32, seed=1, structured_outputs=StructuredOutputsParams(json=Verdict))
    assert llm.generate("Is the fox red?", params)[0].text in ('"yes"', '"no"')
    params = SamplingParams(max_tokens=32, seed=1, structured_outputs=Verdict)
    assert llm.generate("Is the fox red?", params)[0].text in ('"yes"', '"no"')
    question = [{"role": "user", "content": "Is the fox red?"}]
    assert llm.chat(question, response_format=Verdict, max_tokens=32)[0].text in ('"yes"', '"no"')
    params = SamplingParams(max_tokens=32, seed=1, structured_outputs=StructuredOutputsParams(choice=["yes", "no"]))
    assert {output.text for output in llm.generate(["Is it?", "Or not?"], params)} <= {"yes", "no"}
    schema = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
    [output] = llm.chat(
        [{"role": "user", "content": "How old?"}],
        SamplingParams(max_tokens=400, seed=2),
        response_format={"type": "json_schema", "json_schema": {"name": "age", "schema": schema}},
    )
    assert isinstance(json.loads(output.text)["age"], int)


def test_each_prompt_may_have_a_priority(llm):
    params = SamplingParams(max_tokens=2, temperature=0)
    outputs = llm.generate(["a", "b"], params, priority=[-1, 2])
    assert llm.generate("a", params, priority=4)[0].outputs == outputs[0].outputs
    with pytest.raises(RequestError, match="^prompt 1: priority: must be a whole number"):
        llm.generate(["a", "b"], [params, params], priority=[-1, "high"])
    with pytest.raises(ValueError, match="there are 2 prompts and 3 priorities"):
        llm.chat([[{"role": "user", "content": "a"}]] * 2, priority=[1, 2, 3])


def test_the_seed_of_a_model_makes_runs_of_different_draws_equal():
    params = SamplingParams(max_tokens=8, temperature=1.0)

    def run(max_num_seqs):
        with LLM(kv_cache_memory="16M", seed=42, max_num_seqs=max_num_seqs) as own:
            outputs = own.generate(["Once upon a time"] * 6, params) + own.generate("Once upon a time", params)
            stream = own.stream("Once upon a time", params)
            list(stream)
            return [output.text for output in (*outputs, stream.output)]

    texts = run(8)
    assert len(set(texts)) > 6
    assert run(1) == texts
    with LLM(kv_cache_memory="16M") as own:
        own_seed = SamplingParams(max_tokens=8, temperature=1.0, seed=42)
        assert [output.text for output in own.generate(["Once upon a time"] * 2, own_seed)] == texts[:1] * 2


def test_the_prefix_cache_is_told_about(llm):
    prompt = "A prefix that nobody has used before, " * 8
    params = SamplingParams(max_tokens=1, temperature=0)
    before, after = (llm.generate(prompt, params)[0].num_cached_tokens for _ in range(2))
    assert before < after <= len(llm.generate(prompt, params)[0].prompt_token_ids)


def test_threads_run_while_another_waits(llm):
    params = SamplingParams(max_tokens=1900, seed=1, ignore_eos=True)
    waiting = threading.Thread(target=lambda: llm.generate(["Once", "There was"], params))
    waiting.start()
    # Were Python's lock held meanwhile, nothing would run here before the answers are there.
    wait_until(lambda: llm.num_live_requests == 2, "both run")
    assert waiting.is_alive()
    waiting.join()


def test_the_model_is_described(llm):
    assert llm.name == "corella-nano" and llm.max_model_len == 2048
    assert llm.summary.startswith("corella-nano on cpu") and repr(llm) == "<LLM corella-nano>"


class Bar:
    """Counts updates, like a bar of tqdm."""

    def __init__(self, total, desc):
        self.total, self.done, self.is_closed = total, 0, False

    def update(self, number):
        self.done += number

    def close(self):
        self.is_closed = True


def test_vllms_switch_for_a_progress_bar_is_taken(llm):
    params = SamplingParams(max_tokens=4, temperature=0)
    question = [{"role": "user", "content": PROMPTS[0]}]
    expected = [choices(output) for output in llm.generate(PROMPTS, params)]
    for use_tqdm in (False, True):
        assert [choices(output) for output in llm.generate(PROMPTS, params, use_tqdm=use_tqdm)] == expected
        assert len(llm.chat(question, params, use_tqdm=use_tqdm)) == 1
    bars = []

    def make(**options):
        bars.append(Bar(**options))
        return bars[-1]

    llm.generate(PROMPTS, params, use_tqdm=make)
    llm.chat([question, question], params, make)
    llm.embed(PROMPTS, use_tqdm=make)
    assert [(bar.total, bar.done, bar.is_closed) for bar in bars] == [(5, 5, True), (2, 2, True), (5, 5, True)]
