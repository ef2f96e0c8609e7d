"""Streams: deltas add up to the answer, and whoever leaves releases the request."""

import gc

import pytest
from conftest import ROOT
from corella import LLM, EngineError, SamplingParams
from patience import wait_until

QUESTION = [{"role": "user", "content": "Tell me a story about a fox."}]
ENDLESS = SamplingParams(max_tokens=1900, seed=1, ignore_eos=True)


@pytest.mark.parametrize("prompt", ["Once upon a time", QUESTION], ids=["prompt", "conversation"])
@pytest.mark.parametrize("n", [1, 3])
def test_deltas_add_up(llm, prompt, n):
    params = SamplingParams(max_tokens=50, seed=5, n=n, logprobs=1)
    [whole] = llm.generate(prompt, params) if isinstance(prompt, str) else llm.chat(prompt, params)
    stream = llm.stream(prompt, params)
    texts, ids = [""] * n, [[] for _ in range(n)]
    for delta in stream:
        texts[delta.index] += delta.text
        ids[delta.index] += delta.token_ids
    assert texts == [output.text for output in whole.outputs]
    assert ids == [output.token_ids for output in whole.outputs]
    assert stream.output.outputs == whole.outputs
    assert stream.output.prompt_token_ids == whole.prompt_token_ids
    assert stream.output.prompt == whole.prompt and stream.output.finished
    with pytest.raises(StopIteration):
        next(stream)


def test_calls_of_tools_add_up(tmp_path):
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(ROOT / "models/nano" / name)
    template = "{{ tools | tojson }}{% for message in messages %}{{ message.content }}{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(template)
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 3}}\n</tool_call>'
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    with LLM(tmp_path, device="mock", mock_dictation=["It is cold. " + call], tool_call_parser="hermes") as mock:
        [whole] = mock.chat(QUESTION, tools=tools)
        stream = mock.stream(QUESTION, tools=tools)
        list(stream)
    for output in (whole.outputs[0], stream.output.outputs[0]):
        assert output.finish_reason == "tool_calls" and output.text.strip() == "It is cold."
        [made] = output.tool_calls
        assert made["type"] == "function" and made["id"]
        assert made["function"] == {"name": "weather", "arguments": '{"city": "Oslo", "days": 3}'}


def test_leaving_a_stream_ends_its_request(llm):
    def leave_by_closing():
        stream = llm.stream("Once", ENDLESS)
        next(stream)
        stream.close()
        assert list(stream) == []

    def leave_by_dropping():
        for _ in llm.stream("Once", ENDLESS):
            break
        gc.collect()

    def leave_by_with():
        with llm.stream("Once", ENDLESS) as stream:
            next(stream)

    def leave_by_never_reading():
        llm.stream("Once", ENDLESS)

    for leave in (leave_by_closing, leave_by_dropping, leave_by_with, leave_by_never_reading):
        leave()
        wait_until(lambda: llm.num_live_requests == 0, leave.__name__)


def test_a_stream_outlives_the_name_of_its_model():
    params = SamplingParams(max_tokens=20, temperature=0)
    text = "".join(delta.text for delta in LLM(kv_cache_memory="64M").stream("Once upon a time", params))
    with LLM(kv_cache_memory="64M") as llm:
        assert llm.generate("Once upon a time", params)[0].text == text


def test_closing_ends_streams():
    llm = LLM(kv_cache_memory="64M")
    stream = llm.stream("Once", ENDLESS)
    next(stream)
    llm.close()
    with pytest.raises(EngineError):
        list(stream)
    assert list(stream) == []
