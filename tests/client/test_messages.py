"""Tests `/v1/messages` with Anthropic's own Python client."""

import anthropic
import pytest
from patience import PATIENCE_S
from server_process import ServerProcess
from test_tools import ANSWER, CITY, ONE_CALL, QUESTION
from test_tools import client as dictated


@pytest.fixture(scope="module")
def client(served):
    with anthropic.Anthropic(
        base_url=served.server.base_url, api_key="unused", max_retries=0, timeout=PATIENCE_S
    ) as client:
        yield client


def arguments(served, **options):
    messages = [{"role": "user", "content": [{"type": "text", "text": served.text}]}]
    return {
        "model": served.model,
        "max_tokens": 24,
        "messages": messages,
        "extra_body": {"temperature": 0},
    } | options


def test_the_answer_is_that_of_a_chat(served, client):
    message = client.messages.create(**arguments(served))
    chat = served.client.chat.completions.create(
        model=served.model, messages=served.messages, temperature=0, max_tokens=24
    )
    assert "".join(block.text for block in message.content) == chat.choices[0].message.content
    ends = {"stop": "end_turn", "length": "max_tokens"}
    assert message.stop_reason == ends[chat.choices[0].finish_reason]
    usage = message.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == chat.usage.prompt_tokens
    assert usage.output_tokens == chat.usage.completion_tokens


def test_a_stream_is_accumulated_to_the_whole(served, client):
    whole = client.messages.create(**arguments(served))
    with client.messages.stream(**arguments(served)) as stream:
        text = "".join(stream.text_stream)
        message = stream.get_final_message()
    assert [block.model_dump() for block in message.content] == [
        block.model_dump() for block in whole.content
    ]
    assert text == whole.content[0].text
    assert message.stop_reason == whole.stop_reason
    assert message.usage.output_tokens == whole.usage.output_tokens


def test_a_stop_sequence_is_named(served, client):
    whole = client.messages.create(**arguments(served)).content[0].text
    stop = whole[3:6]
    message = client.messages.create(**arguments(served, stop_sequences=[stop]))
    assert message.stop_reason == "stop_sequence"
    assert message.stop_sequence == stop
    text = "".join(block.text for block in message.content)
    assert text == whole[: whole.index(stop)]


def test_tokens_are_counted_without_an_answer(served, client):
    fields = arguments(served, system="Be kind.")
    del fields["max_tokens"], fields["extra_body"]
    count = client.messages.count_tokens(**fields).input_tokens
    usage = client.messages.create(**arguments(served, system="Be kind.")).usage
    assert count == usage.input_tokens + usage.cache_read_input_tokens


def test_errors_have_their_types(served, client):
    with pytest.raises(anthropic.NotFoundError) as error:
        client.messages.create(**arguments(served, model="other"))
    assert error.value.body["error"]["type"] == "not_found_error"
    assert error.value.request_id
    with pytest.raises(anthropic.BadRequestError) as error:
        client.messages.create(**arguments(served, max_tokens=0))
    assert error.value.body["error"]["message"].startswith("max_tokens: ")


def test_a_key_is_taken_as_they_send_it():
    with ServerProcess("--api-key", "secret") as server:
        fields = {"max_tokens": 2, "messages": [{"role": "user", "content": "Hi"}]}
        for key, is_right in [("secret", True), ("wrong", False)]:
            with anthropic.Anthropic(
                base_url=server.base_url, api_key=key, max_retries=0
            ) as client:
                if is_right:
                    assert client.messages.create(model="corella-nano", **fields).id
                    continue
                with pytest.raises(anthropic.AuthenticationError):
                    client.messages.create(model="corella-nano", **fields)


TOOL = {
    "name": "get_weather",
    "description": "The weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


def test_a_tool_is_called_answered_and_read(dictated):
    base_url = str(dictated.base_url).removesuffix("/v1/")
    fields = {"model": dictated.models.list().data[0].id, "max_tokens": 500, "tools": [TOOL]}
    with anthropic.Anthropic(base_url=base_url, api_key="unused", max_retries=0) as client:

        def ask(seed, messages):
            return fields | {"messages": messages, "extra_body": {"seed": seed}}

        whole = client.messages.create(**ask(ONE_CALL, QUESTION))
        with client.messages.stream(**ask(ONE_CALL, QUESTION)) as stream:
            streamed = stream.get_final_message()
        for message in [whole, streamed]:
            thought, text, call = message.content
            assert (thought.type, thought.thinking) == ("thinking", "Hm, été.")
            assert (text.type, text.text) == ("text", "I look.")
            assert (call.type, call.name, call.input) == ("tool_use", "get_weather", CITY)
            assert message.stop_reason == "tool_use"
        history = QUESTION + [
            {"role": "assistant", "content": [block.to_dict() for block in whole.content]},
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}],
            },
        ]
        answer = client.messages.create(**ask(ANSWER, history))
        assert answer.content[-1].text == "It is sunny."
        assert answer.stop_reason == "end_turn"
