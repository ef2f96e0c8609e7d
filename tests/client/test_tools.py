"""Tests tool calls and reasoning with OpenAI's own Python client. The mock dictates the replies, and the seed of a
request selects one."""

import json

import anthropic
import byte_model
import jsonschema
import openai
import pytest
from server_process import ServerProcess

SPECIAL = ["<|user|>", "<|assistant|>", "<|tool|>", "<|end|>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]",
           "<think>", "</think>", "[ARGS]"]

CONVERSATION = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|{{ m.role }}|>"
    "{{ m.content if m.content is string else '' }}{% for c in m.tool_calls %}CALL"
    "{{ c.function.arguments | tojson }}{% endfor %}<|end|>{% endfor %}<|assistant|>"
)

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CITY = {"city": "Orléans"}
ARGUMENTS = json.dumps(CITY, ensure_ascii=False)
QUESTION = [{"role": "user", "content": "What is the weather?"}]

# A call with reasoning and text before it, two calls, and an answer, in each format.
FORMATS = {
    "hermes": (
        "<tool_call>",
        f'<think>\nHm, été.\n</think>\n\nI look.\n<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>',
        f'<tool_call>{{"name": "get_weather", "arguments": {ARGUMENTS}}}</tool_call>\n' * 2,
    ),
    "mistral": (
        "[TOOL_CALLS]",
        f"<think>Hm, été.</think>I look.[TOOL_CALLS]get_weather[ARGS]{ARGUMENTS}",
        f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {ARGUMENTS}}}, {{"name": "get_weather", "arguments": {ARGUMENTS}}}]',
    ),
}
ONE_CALL, TWO_CALLS, ANSWER = range(3)


def make_folder(folder, template):
    return byte_model.make(folder, template, SPECIAL, ends=["<|end|>"])


def dictating_server(name, folder):
    """A server whose model calls in the format `name`, with the reply that the seed of a request selects."""
    marker, *replies = FORMATS[name]
    # The template shows the format in its source, and reasoning likewise.
    template = CONVERSATION.replace("CALL", marker) + "{# <think> #}"
    replies = [*replies, "<think></think>It is sunny."]
    dictation = [f"--mock-dictation={reply}" for reply in replies]
    return ServerProcess(make_folder(folder, template), "--device", "mock", *dictation)


@pytest.fixture(scope="module", params=FORMATS)
def client(request, tmp_path_factory):
    with dictating_server(request.param, tmp_path_factory.mktemp(request.param)) as server:
        yield server.client


def create(client, seed, messages=QUESTION, **options):
    options = {"tools": [WEATHER]} | options
    return client.chat.completions.create(model=client.models.list().data[0].id, messages=messages, seed=seed, **options)


def test_a_call_is_made_answered_and_read(client):
    choice = create(client, ONE_CALL).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I look."
    assert choice.message.reasoning_content == "Hm, été."
    (call,) = choice.message.tool_calls
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == CITY
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    choice = create(client, ANSWER, [*QUESTION, choice.message.to_dict(), result]).choices[0]
    assert choice.finish_reason == "stop"
    assert choice.message.content == "It is sunny."
    assert choice.message.tool_calls is None


def test_parallel_calls_have_ids_of_their_own(client):
    calls = create(client, TWO_CALLS).choices[0].message.tool_calls
    assert [json.loads(call.function.arguments) for call in calls] == [CITY, CITY]
    assert calls[0].id != calls[1].id
    calls = create(client, TWO_CALLS, parallel_tool_calls=False).choices[0].message.tool_calls
    assert len(calls) == 1


@pytest.mark.parametrize("seed", [ONE_CALL, TWO_CALLS, ANSWER])
def test_a_stream_says_what_the_whole_says(client, seed):
    whole = create(client, seed).choices[0]
    options = {"tools": [WEATHER], "model": "x", "messages": QUESTION, "seed": seed}
    options["model"] = client.models.list().data[0].id
    with client.chat.completions.stream(**options) as stream:
        for event in stream:
            if event.type == "content.delta":
                assert not set(event.delta) & set("<>[]")
        final = stream.get_final_completion().choices[0]
    assert final.finish_reason == whole.finish_reason
    assert (final.message.content or None) == whole.message.content
    calls = [(call.function.name, call.function.arguments) for call in whole.message.tool_calls or []]
    assert [(call.function.name, call.function.arguments) for call in final.message.tool_calls or []] == calls


def test_a_demanded_call_that_is_cut_off_has_no_markup():
    """The built-in model writes a tag in several tokens."""
    with ServerProcess("--kv-cache-memory", "64M") as server:
        for max_tokens in range(1, 7):
            options = {"tool_choice": "required", "temperature": 0, "max_tokens": max_tokens}
            whole = create(server.client, None, **options).choices[0]
            assert whole.finish_reason == "length" and not whole.message.content, whole
            chunks = create(server.client, None, stream=True, **options)
            assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "", max_tokens


def test_none_offers_no_tools(client):
    with_tools = create(client, ANSWER).usage.prompt_tokens
    without = create(client, ANSWER, tool_choice="none").usage.prompt_tokens
    assert without < with_tools


def test_a_tool_that_is_none_is_named(client):
    with pytest.raises(openai.BadRequestError) as error:
        create(client, ANSWER, tools=[{"type": "function", "function": {"name": "two words"}}])
    assert error.value.param == "tools[0].function.name"


STRICT_WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 1, "maxLength": 8},
        "days": {"type": "integer", "minimum": 1, "maximum": 12},
        "unit": {"enum": ["celsius", "fahrenheit"]},
        "places": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
    },
    "required": ["city", "days", "places"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module", params=FORMATS)
def random_server(request, tmp_path_factory):
    """A model that draws any allowed token at random."""
    marker = FORMATS[request.param][0]
    template = CONVERSATION.replace("CALL", marker) + "{# <think> #}"
    folder = make_folder(tmp_path_factory.mktemp(f"random-{request.param}"), template)
    with ServerProcess(folder, "--device", "mock") as server:
        yield server


def assert_weather(call):
    assert call.function.name == "get_weather"
    jsonschema.validate(json.loads(call.function.arguments), STRICT_WEATHER)


def test_calls_that_have_to_be_made_follow_their_schema(random_server):
    tool = {"type": "function", "function": WEATHER["function"] | {"parameters": STRICT_WEATHER}}
    named = {"type": "function", "function": {"name": "get_weather"}}
    for seed in range(4):
        options = {"model": random_server.model(), "messages": QUESTION, "seed": seed, "tools": [tool]}
        required = options | {"tool_choice": "required", "max_tokens": 300}
        choice = random_server.client.chat.completions.create(**required).choices[0]
        # This model hardly ever ends by itself, so the last of its calls may be cut off.
        is_whole = choice.finish_reason == "tool_calls"
        assert is_whole or choice.finish_reason == "length"
        calls = choice.message.tool_calls or []
        for call in calls if is_whole else calls[:-1]:
            assert_weather(call)
        choice = random_server.client.chat.completions.create(**options, tool_choice=named).choices[0]
        assert choice.finish_reason == "stop"
        (call,) = choice.message.tool_calls
        assert_weather(call)
        with random_server.client.chat.completions.stream(
            **options, tool_choice="required", parallel_tool_calls=False
        ) as stream:
            choice = stream.get_final_completion().choices[0]
        (call,) = choice.message.tool_calls
        assert choice.finish_reason == "tool_calls"
        assert_weather(call)


def test_anthropic_demands_calls_in_its_own_words(random_server):
    tool = {"name": "get_weather", "description": "d", "input_schema": STRICT_WEATHER}
    with anthropic.Anthropic(base_url=random_server.base_url, api_key="unused", max_retries=0) as client:
        for choice in [{"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "get_weather"}]:
            options = {
                "model": random_server.model(), "max_tokens": 3000, "messages": QUESTION, "tools": [tool],
                "tool_choice": choice, "extra_body": {"seed": 3},
            }
            whole = client.messages.create(**options)
            with client.messages.stream(**options) as stream:
                streamed = stream.get_final_message()
            for message in [whole, streamed]:
                assert message.stop_reason == "tool_use"
                uses = [block for block in message.content if block.type == "tool_use"]
                assert uses and not any(block.type == "text" for block in message.content)
                for use in uses:
                    jsonschema.validate(use.input, STRICT_WEATHER)


def test_anthropic_gives_a_format(random_server):
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"],
              "additionalProperties": False}
    with anthropic.Anthropic(base_url=random_server.base_url, api_key="unused", max_retries=0) as client:
        message = client.messages.create(
            model=random_server.model(), max_tokens=3000, messages=QUESTION, extra_body={"seed": 1},
            output_config={"format": {"type": "json_schema", "schema": schema}},
        )
    (text,) = [block.text for block in message.content if block.type == "text"]
    jsonschema.validate(json.loads(text), schema)
    assert message.stop_reason == "end_turn"
