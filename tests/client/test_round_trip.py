"""Sends answers back as the official clients' own objects dump them: with every member that the library knows."""

from typing import Literal

import anthropic
import ollama
import openai
import pydantic
import pytest
from openai.types.chat import ParsedChatCompletionMessage
from patience import PATIENCE_S
from test_tools import ARGUMENTS, CITY, ONE_CALL, QUESTION, TWO_CALLS, WEATHER
from test_tools import client as dictated  # noqa: F401


def said(role, content):
    return {"role": role, "content": content}


def test_a_parsed_message_of_a_chat(served):
    def create(*messages, max_tokens):
        return served.client.chat.completions.create(
            model=served.model, messages=messages, temperature=0, max_tokens=max_tokens
        )

    asked = said("user", served.text)
    message = create(asked, max_tokens=8).choices[0].message
    # `parse` makes this from an answer.
    parsed = ParsedChatCompletionMessage(**message.model_dump(), parsed={"city": "Bern"})
    whole, plain = (
        create(asked, answer, asked, max_tokens=4)
        for answer in (parsed.model_dump(), said("assistant", message.content))
    )
    assert whole.usage.prompt_tokens == plain.usage.prompt_tokens
    assert whole.choices[0].message.content == plain.choices[0].message.content


def test_items_of_a_response(served):
    def create(*items, max_tokens):
        return served.client.responses.create(
            model=served.model, input=items, temperature=0, max_output_tokens=max_tokens
        )

    asked = said("user", served.text)
    first = create(asked, max_tokens=8)
    items = [item.model_dump() for item in first.output]
    whole = create(asked, *items, asked, max_tokens=4)
    plain = create(asked, said("assistant", first.output_text), asked, max_tokens=4)
    assert whole.usage.input_tokens == plain.usage.input_tokens
    assert whole.output_text == plain.output_text


@pytest.mark.parametrize("keeps", ["message", "content"])
def test_a_message(served, keeps):
    with anthropic.Anthropic(
        base_url=served.server.base_url, api_key="unused", max_retries=0, timeout=PATIENCE_S
    ) as client:

        def create(*messages):
            return client.messages.create(
                model=served.model, max_tokens=8, messages=messages, extra_body={"temperature": 0}
            )

        asked = said("user", served.text)
        first = create(asked)
        dumped = first.model_dump()
        sent_back = dumped if keeps == "message" else said("assistant", dumped["content"])
        whole = create(asked, sent_back, asked)
        plain = create(asked, said("assistant", first.content[0].text), asked)
    assert whole.content[0].text == plain.content[0].text
    usages = (whole.usage, plain.usage)
    assert len({usage.input_tokens + usage.cache_read_input_tokens for usage in usages}) == 1


class GetWeather(pydantic.BaseModel):
    """The weather of a city"""

    city: str


class Kind(pydantic.BaseModel):
    kind: Literal["a", "b"]


def model_of(client):
    return client.models.list().data[0].id


def host_of(client):
    return str(client.base_url).removesuffix("/v1/")


def chat_tokens(client, tools, *messages):
    return client.chat.completions.create(
        model=model_of(client), messages=[*QUESTION, *messages], tools=tools, max_tokens=1
    ).usage.prompt_tokens


def plain_call(call_id, text=None):
    """Returns a call with only the members that the API requires."""
    function = {"name": "get_weather", "arguments": ARGUMENTS}
    return {"role": "assistant", "content": text, "tool_calls": [{"id": call_id, "type": "function", "function": function}]}


def asked_whole(client, **options):
    return client.chat.completions.create(**options).choices[0].message


def asked_in_a_stream(client, **options):
    with client.chat.completions.stream(**options) as stream:
        return stream.get_final_completion().choices[0].message


def asked_and_parsed(client, **options):
    return client.chat.completions.parse(**options).choices[0].message


@pytest.mark.parametrize("ask", [asked_whole, asked_in_a_stream, asked_and_parsed])
def test_a_call_in_a_chat(dictated, ask):
    tool = openai.pydantic_function_tool(GetWeather, name="get_weather")
    message = ask(dictated, model=model_of(dictated), messages=QUESTION, tools=[tool], seed=ONE_CALL)
    (call,) = message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    plain = chat_tokens(dictated, [tool], plain_call(call.id, message.content), result)
    for dumped in (message.model_dump(), message.model_dump(by_alias=True), message.to_dict(), message):
        assert chat_tokens(dictated, [tool], dumped, result) == plain


# The other model's tokenizer does not know the letters.
@pytest.mark.parametrize("served", ["built-in"], indirect=True)
def test_a_parsed_answer_of_a_chat(served):
    options = {"model": served.model, "messages": served.messages, "max_tokens": 64}
    message = served.client.chat.completions.parse(**options, response_format=Kind).choices[0].message
    assert message.parsed.kind in ("a", "b")
    tokens = {
        served.client.chat.completions.create(
            model=served.model, messages=[*served.messages, answer, *served.messages], max_tokens=1
        ).usage.prompt_tokens
        for answer in (message.model_dump(), said("assistant", message.content))
    }
    assert len(tokens) == 1


@pytest.mark.parametrize("served", ["built-in"], indirect=True)
def test_a_parsed_response(served):
    options = {"model": served.model, "max_output_tokens": 64}
    first = served.client.responses.parse(input=served.messages, text_format=Kind, **options)
    assert first.output_parsed.kind in ("a", "b")
    tokens = {
        served.client.responses.create(input=[*served.messages, *items, *served.messages], **options).usage.input_tokens
        for items in ([item.model_dump() for item in first.output], [said("assistant", first.output_text)])
    }
    assert len(tokens) == 1


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_call_in_a_response(dictated, is_stream):
    tool = {"type": "function", "strict": True} | WEATHER["function"]
    options = {"model": model_of(dictated), "tools": [tool], "extra_body": {"seed": ONE_CALL}}
    if is_stream:
        with dictated.responses.stream(input=QUESTION, **options) as stream:
            output = stream.get_final_response().output
    else:
        output = dictated.responses.create(input=QUESTION, **options).output
    assert {item.type for item in output} == {"reasoning", "message", "function_call"}
    (call,) = [item for item in output if item.type == "function_call"]
    (message,) = [item for item in output if item.type == "message"]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    bare_call = {"type": "function_call", "call_id": call.call_id, "name": "get_weather", "arguments": ARGUMENTS}
    plain = [said("assistant", message.content[0].text), bare_call]
    dumps = (
        [item.model_dump() for item in output],
        [item.model_dump(by_alias=True) for item in output],
        [item.to_dict() for item in output],
    )
    tokens = [
        dictated.responses.create(input=[*QUESTION, *items, result], **options).usage.input_tokens
        for items in (plain, *dumps)
    ]
    assert len(set(tokens)) == 1, tokens


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_use_of_a_tool(dictated, is_stream):
    function = WEATHER["function"]
    tool = {"name": function["name"], "description": function["description"], "input_schema": function["parameters"]}
    options = {"model": model_of(dictated), "tools": [tool], "max_tokens": 200, "extra_body": {"seed": TWO_CALLS}}
    with anthropic.Anthropic(
        base_url=host_of(dictated), api_key="unused", max_retries=0, timeout=PATIENCE_S
    ) as client:
        if is_stream:
            with client.messages.stream(messages=QUESTION, **options) as stream:
                first = stream.get_final_message()
        else:
            first = client.messages.create(messages=QUESTION, **options)
        uses = [block for block in first.content if block.type == "tool_use"]
        assert [use.input for use in uses] == [CITY, CITY]
        results = [{"type": "tool_result", "tool_use_id": use.id, "content": "sunny"} for use in uses]
        bare = [{"type": "tool_use", "id": use.id, "name": use.name, "input": use.input} for use in uses]
        dumped = first.model_dump()
        tokens = [
            client.messages.count_tokens(
                model=options["model"], tools=[tool], messages=[*QUESTION, answer, said("user", results)]
            ).input_tokens
            for answer in (
                said("assistant", bare),
                said("assistant", dumped["content"]),
                said("assistant", first.content),
                dumped,
                first.to_dict(),
            )
        ]
    assert len(set(tokens)) == 1, tokens


def test_a_call_in_ollamas_chat(dictated):
    client, model = ollama.Client(host=host_of(dictated)), model_of(dictated)
    message = client.chat(model, QUESTION, tools=[WEATHER], options={"seed": ONE_CALL}, think=True).message
    (call,) = message.tool_calls
    result = {"role": "tool", "content": "sunny", "tool_name": "get_weather"}
    function = {"name": call.function.name, "arguments": CITY}
    plain = said("assistant", message.content) | {"tool_calls": [{"function": function}]}
    counts = [
        client.chat(model, [*QUESTION, answer, result], tools=[WEATHER], options={"num_predict": 1}).prompt_eval_count
        for answer in (plain, message, message.model_dump(), message.model_dump(exclude_none=True))
    ]
    assert len(set(counts)) == 1, counts
