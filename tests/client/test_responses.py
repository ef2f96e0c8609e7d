"""Tests `/v1/responses` with OpenAI's own Python client."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest
from server_process import ServerProcess
from test_tools import ANSWER, CITY, CONVERSATION, ONE_CALL, WEATHER, make_folder
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


def test_three_turns_are_the_conversation_sent_whole(served):
    questions = [served.text, served.text[::-1], served.text[:9]]
    kept, items = None, []
    for question in questions:
        kept = respond(served, question, previous_response_id=kept.id if kept else None)
        items.append({"role": "user", "content": question})
        whole = respond(served, items, store=False)
        assert kept.output_text == whole.output_text
        assert kept.usage.input_tokens == whole.usage.input_tokens
        assert kept.store and not whole.store
        items += [item.model_dump() for item in whole.output]
    assert served.client.responses.retrieve(kept.id).to_dict() == kept.to_dict()
    (item,) = served.client.responses.input_items.list(kept.id)
    assert (item.role, item.content[0].text) == ("user", questions[-1])
    # Instructions belong to their own request.
    more = {"instructions": served.text[:5]}
    last = respond(served, served.text, previous_response_id=kept.id, **more)
    items.append({"role": "user", "content": served.text})
    whole = respond(served, items, store=False, **more)
    assert (last.output_text, last.previous_response_id) == (whole.output_text, kept.id)


def test_a_streamed_response_is_kept_too(served):
    arguments = {"model": served.model, "input": served.text} | GREEDY
    with served.client.responses.create(**arguments, stream=True) as stream:
        first = list(stream)[-1].response
    assert served.client.responses.retrieve(first.id).to_dict() == first.to_dict()
    items = [{"role": "user", "content": served.text}, *(item.to_dict() for item in first.output)]
    items.append({"role": "user", "content": served.text[:9]})
    kept = respond(served, served.text[:9], previous_response_id=first.id)
    assert kept.output_text == respond(served, items).output_text


def missing(client, id, reason):
    for ask in [client.retrieve, client.delete, client.input_items.list]:
        with pytest.raises(openai.NotFoundError) as error:
            ask(id)
        assert reason in error.value.message and error.value.code == "response_not_found"


def test_what_is_not_there_says_why(served):
    first, unkept = respond(served), respond(served, store=False)
    client = served.client.responses
    client.delete(first.id)
    missing(client, first.id, "was deleted")
    missing(client, unkept.id, "`store` false")
    missing(client, "resp_1", "never was")
    with pytest.raises(openai.BadRequestError) as error:
        respond(served, previous_response_id=first.id)
    assert error.value.code == "previous_response_not_found"
    assert error.value.param == "previous_response_id" and "was deleted" in error.value.message


def test_the_store_is_bounded_and_can_be_off():
    fields = {"model": "corella-nano", "input": "Hi", "max_output_tokens": 1}
    with ServerProcess("--max-stored-response-bytes", "64K") as server:
        first = server.client.responses.create(**fields)
        ids = [server.client.responses.create(**fields).id for _ in range(100)]
        missing(server.client.responses, first.id, "--max-stored-response-bytes")
        assert server.client.responses.retrieve(ids[-1]).id == ids[-1]
    with ServerProcess("--max-stored-response-bytes", "0") as server:
        answer = server.client.responses.create(**fields)
        assert not answer.store
        missing(server.client.responses, answer.id, "keeps no responses")
        with pytest.raises(openai.BadRequestError) as error:
            server.client.responses.create(**fields, previous_response_id=answer.id)
        assert "--max-stored-response-bytes 0" in error.value.message


def resident_mib(server):
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1024


@pytest.mark.night
def test_ten_thousand_responses_take_no_more_than_they_may(tmp_path):
    # Each response has an input of 16 KiB, so that all together would take 160 MiB.
    pad = {"note": "x" * (16 << 10)}
    folder = make_folder(tmp_path / "mock", CONVERSATION)
    options = ["--device", "mock", "--mock-dictation=a", "--max-stored-response-bytes", "8M"]
    with ServerProcess(folder, *options) as server:
        model = server.model()

        def create(_):
            fields = {"model": model, "input": "a", "max_output_tokens": 1, "metadata": pad}
            return server.client.responses.create(**fields).id

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(create, range(500)))
            before = resident_mib(server)
            ids = list(pool.map(create, range(9_500)))
        assert resident_mib(server) < before + 40
        assert server.client.responses.retrieve(ids[-1]).id == ids[-1]
        missing(server.client.responses, ids[-4000], "was dropped")


def test_each_key_has_responses_of_its_own(tmp_path):
    keys = {name: f"sk-{name}-3f1c9a7e5b2d4068" for name in ["one", "two"]}
    lines = [f'[[key]]\nname = "{name}"\nkey = "{key}"\n' for name, key in keys.items()]
    (tmp_path / "keys.toml").write_text("".join(lines))
    fields = {"model": "corella-nano", "input": "Hi", "max_output_tokens": 1}
    with ServerProcess("--api-keys", tmp_path / "keys.toml") as server:
        one, two = (server.client.with_options(api_key=key).responses for key in keys.values())
        id = one.create(**fields).id
        missing(two, id, "never was")
        with pytest.raises(openai.BadRequestError):
            two.create(**fields, previous_response_id=id)
        assert one.retrieve(id).id == id


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
