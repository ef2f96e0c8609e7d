"""Tests `/v1/responses` with OpenAI's own Python client."""

import json

import openai
import pytest
from test_tools import ANSWER, CITY, ONE_CALL, WEATHER
from test_tools import client as dictated

GREEDY = {"temperature": 0, "max_output_tokens": 24}


def respond(served, text=None, **options):
    return served.client.responses.create(
        model=served.model, input=served.text if text is None else text, **GREEDY | options
    )


def test_the_answer_is_that_of_a_chat(served):
    response = respond(served)
    chat = served.client.chat.completions.create(
        model=served.model, messages=served.messages, temperature=0, max_tokens=24
    )
    assert response.output_text == chat.choices[0].message.content
    assert response.usage.input_tokens == chat.usage.prompt_tokens
    assert response.usage.output_tokens == chat.usage.completion_tokens
    ends = {"stop": "completed", "length": "incomplete"}
    assert response.status == ends[chat.choices[0].finish_reason]


def test_a_stream_is_accumulated_to_the_whole(served):
    whole = respond(served)
    arguments = {"model": served.model, "input": served.text} | GREEDY
    with served.client.responses.stream(**arguments) as stream:
        events = list(stream)
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text
    last = events[-1]
    assert last.type == f"response.{whole.status}"
    assert last.response.output_text == whole.output_text
    assert last.response.usage.output_tokens == whole.usage.output_tokens
    assert [event.sequence_number for event in events] == list(range(len(events)))


def test_the_next_turn_sends_the_output_back(served):
    first = respond(served)
    items = [{"role": "user", "content": served.text}]
    items += [item.model_dump() for item in first.output]
    items.append({"role": "user", "content": served.text})
    second = respond(served, items)
    assert second.usage.input_tokens > first.usage.input_tokens + first.usage.output_tokens


def test_nothing_is_kept(served):
    with pytest.raises(openai.BadRequestError) as error:
        respond(served, previous_response_id="resp_1")
    assert error.value.param == "previous_response_id"
    assert "whole conversation" in error.value.message


def test_a_tool_is_called_answered_and_read(dictated):
    tool = {"type": "function", "strict": False} | WEATHER["function"]
    question = {"role": "user", "content": "What is the weather?"}
    fields = {"model": dictated.models.list().data[0].id, "tools": [tool]}

    def ask(seed, items):
        return fields | {"input": items, "extra_body": {"seed": seed}}

    whole = dictated.responses.create(**ask(ONE_CALL, [question]))
    with dictated.responses.stream(**ask(ONE_CALL, [question])) as stream:
        streamed = stream.get_final_response()
    for response in [whole, streamed]:
        thought, message, call = response.output
        assert (thought.type, thought.content[0].text) == ("reasoning", "Hm, été.")
        assert (message.type, response.output_text) == ("message", "I look.")
        assert (call.type, call.name, json.loads(call.arguments)) == (
            "function_call",
            "get_weather",
            CITY,
        )
    history = [question, *(item.to_dict() for item in whole.output)]
    history.append({"type": "function_call_output", "call_id": call.call_id, "output": "sunny"})
    answer = dictated.responses.create(**ask(ANSWER, history))
    assert answer.output_text == "It is sunny."
    assert answer.status == "completed"
