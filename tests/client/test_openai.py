"""Tests the built binary with OpenAI's own Python client."""

import openai
import pytest
from server_process import ServerProcess

GREEDY = {"temperature": 0, "max_tokens": 24}


def chat(served, **options):
    return served.client.chat.completions.create(
        model=served.model, messages=served.messages, **options
    )


def complete(served, prompt=None, **options):
    return served.client.completions.create(
        model=served.model, prompt=served.text if prompt is None else prompt, **options
    )


def streamed_text(chunks):
    return "".join(
        choice.delta.content or "" for chunk in chunks for choice in chunk.choices
    )


def finish_reasons(chunks):
    return [
        choice.finish_reason
        for chunk in chunks
        for choice in chunk.choices
        if choice.finish_reason is not None
    ]


def ignoring_eos(**options):
    return GREEDY | {"extra_body": {"ignore_eos": True}} | options


class TestModels:
    def test_list_and_retrieve(self, served):
        models = served.client.models.list().data
        assert [model.object for model in models] == ["model"]
        assert served.client.models.retrieve(models[0].id).id == models[0].id

    def test_unknown_model(self, served):
        with pytest.raises(openai.NotFoundError) as error:
            served.client.chat.completions.create(model="no-such", messages=served.messages)
        assert error.value.param == "model"


class TestFields:
    def test_a_typo(self, served):
        with pytest.raises(openai.BadRequestError) as error:
            chat(served, extra_body={"temprature": 0.5})
        assert error.value.param == "temprature"
        assert error.value.code == "unknown_parameter"
        assert "did you mean `temperature`?" in error.value.message


def test_what_cannot_fit_by_its_bytes():
    with ServerProcess() as server:
        with pytest.raises(openai.BadRequestError) as error:
            server.client.completions.create(model=server.model(), prompt=" " * 7_000_000)
        assert error.value.code == "context_length_exceeded"
        assert "at least" in error.value.message


class TestChat:
    def test_streamed_equals_whole(self, served):
        whole = chat(served, **GREEDY).choices[0]
        chunks = list(chat(served, stream=True, **GREEDY))
        assert whole.message.role == "assistant"
        assert chunks[0].choices[0].delta.role == "assistant"
        assert whole.message.content
        assert streamed_text(chunks) == whole.message.content
        assert finish_reasons(chunks) == [whole.finish_reason]
        assert len({chunk.id for chunk in chunks}) == 1
        assert all(chunk.object == "chat.completion.chunk" for chunk in chunks)

    def test_seed_repeats(self, served):
        def draw(seed):
            options = ignoring_eos(temperature=1.0, seed=seed)
            return chat(served, **options).choices[0].message.content

        assert draw(7) == draw(7)
        assert len({draw(seed) for seed in range(4)}) > 1

    def test_usage(self, served):
        whole = chat(served, **ignoring_eos())
        assert whole.usage.completion_tokens == 24
        assert whole.usage.prompt_tokens > 0
        assert whole.usage.total_tokens == whole.usage.prompt_tokens + 24
        assert whole.choices[0].finish_reason == "length"

    def test_usage_in_a_stream_only_when_asked_for(self, served):
        plain = list(chat(served, stream=True, **ignoring_eos()))
        assert all(chunk.usage is None for chunk in plain)
        assert all(chunk.choices for chunk in plain)

        options = ignoring_eos(stream_options={"include_usage": True})
        chunks = list(chat(served, stream=True, **options))
        *before, last = chunks
        assert last.choices == []
        assert last.usage.completion_tokens == 24
        assert last.usage.prompt_tokens == chat(served, **ignoring_eos()).usage.prompt_tokens
        assert all(chunk.usage is None for chunk in before)
        assert streamed_text(chunks) == streamed_text(plain)

    def test_n_choices(self, served):
        options = ignoring_eos(n=3, temperature=1.0, seed=5, max_tokens=16)
        whole = chat(served, **options)
        texts = [choice.message.content for choice in whole.choices]
        assert [choice.index for choice in whole.choices] == [0, 1, 2]
        assert len(set(texts)) == 3
        assert whole.usage.completion_tokens == 3 * 16

        streamed = ["", "", ""]
        chunks = list(chat(served, stream=True, **options))
        for chunk in chunks:
            for choice in chunk.choices:
                streamed[choice.index] += choice.delta.content or ""
        assert streamed == texts
        assert finish_reasons(chunks) == ["length"] * 3

    def test_stop_string(self, served):
        whole = chat(served, **ignoring_eos()).choices[0].message.content
        stop = whole[len(whole) // 2 :][:3]
        expected = whole[: whole.index(stop)]
        options = ignoring_eos(stop=["\u0000never", stop])
        stopped = chat(served, **options).choices[0]
        assert stopped.message.content == expected
        assert stopped.finish_reason == "stop"

        chunks = list(chat(served, stream=True, **options))
        assert streamed_text(chunks) == expected
        assert finish_reasons(chunks) == ["stop"]

    def test_max_completion_tokens(self, served):
        options = {"temperature": 0, "extra_body": {"ignore_eos": True}}
        whole = chat(served, max_completion_tokens=5, **options)
        assert whole.usage.completion_tokens == 5

    def test_cached_tokens(self, served):
        salted = ignoring_eos(extra_body={"ignore_eos": True, "cache_salt": "cached"})
        cold, warm = chat(served, **salted), chat(served, **salted)
        assert warm.choices[0].message.content == cold.choices[0].message.content
        assert cached_tokens(cold) == 0
        assert 0 < cached_tokens(warm) < warm.usage.prompt_tokens
        other = ignoring_eos(extra_body={"ignore_eos": True, "cache_salt": "another"})
        assert cached_tokens(chat(served, **other)) == 0


def cached_tokens(answer):
    details = answer.usage.prompt_tokens_details
    return (details and details.cached_tokens) or 0


class TestCompletions:
    def test_streamed_equals_whole(self, served):
        whole = complete(served, **GREEDY).choices[0]
        chunks = list(complete(served, stream=True, **GREEDY))
        text = "".join(choice.text for chunk in chunks for choice in chunk.choices)
        assert text == whole.text
        assert finish_reasons(chunks) == [whole.finish_reason]

    def test_token_ids(self, served):
        ids = [40, 41, 42, 43, 44]
        answer = complete(served, prompt=ids, **ignoring_eos())
        assert answer.usage.prompt_tokens == 5
        several = complete(served, prompt=[ids, ids[:2]], **ignoring_eos())
        assert [choice.index for choice in several.choices] == [0, 1]
        assert several.choices[0].text == answer.choices[0].text
        assert several.usage.prompt_tokens == 7

    def test_several_prompts(self, served):
        alone = complete(served, **ignoring_eos()).choices[0].text
        both = complete(served, prompt=[served.text, served.text[:9]], **ignoring_eos())
        assert [choice.index for choice in both.choices] == [0, 1]
        assert both.choices[0].text == alone

    def test_logprobs(self, served):
        answer = complete(served, logprobs=2, **ignoring_eos()).choices[0]
        assert len(answer.logprobs.tokens) == 24
        for drawn, top in zip(answer.logprobs.token_logprobs, answer.logprobs.top_logprobs):
            assert drawn <= 0
            # Greedy sampling draws the most likely token.
            assert drawn == max(top.values())


class TestErrors:
    @pytest.mark.parametrize(
        "field, value",
        [
            ("temperature", -1),
            ("temperature", "hot"),
            ("top_p", 0),
            ("top_p", 1.5),
            ("n", 0),
            ("max_tokens", 0),
            ("max_tokens", 10**6),
            ("stop", [""]),
            ("stop", 5),
            ("stream_options", {"include_usage": True}),
            ("messages", []),
            ("messages", "hello"),
            ("response_format", {"type": "json"}),
        ],
    )
    def test_bad_fields_are_named(self, served, field, value):
        request = {"model": served.model, "messages": served.messages, field: value}
        with pytest.raises(openai.BadRequestError) as error:
            served.client.chat.completions.create(**request)
        named = error.value.param
        if field == "max_tokens" and value > 1:
            # The prompt and the output share the context, so shortening either would help.
            assert "max_tokens" in error.value.message
        else:
            assert named.split("[")[0].split(".")[0] == field
        assert field in error.value.message

    @pytest.mark.parametrize(
        "field, value", [("top_k", -5), ("min_p", 2), ("min_tokens", "many"), ("cache_salt", "")]
    )
    def test_fields_beyond_openai(self, served, field, value):
        with pytest.raises(openai.BadRequestError) as error:
            chat(served, extra_body={field: value})
        assert error.value.param == field

    def test_prompt_beyond_the_context(self, served):
        with pytest.raises(openai.BadRequestError) as error:
            complete(served, prompt=[40] * 5000, max_tokens=1)
        assert error.value.code == "context_length_exceeded"
        assert error.value.param == "prompt"

    def test_token_beyond_the_vocabulary(self, served):
        with pytest.raises(openai.BadRequestError) as error:
            complete(served, prompt=[40, 10**6], max_tokens=1)
        assert error.value.param.startswith("prompt")

    def test_unknown_path(self, served):
        with pytest.raises(openai.NotFoundError):
            served.client.images.generate(prompt="a fox")

    def test_the_server_goes_on(self, served):
        assert chat(served, **GREEDY).choices[0].message.content
        assert served.server.status_of("/health") == 200
