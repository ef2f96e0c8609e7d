"""Tools with the built-in model, by each API. The model was not trained to call tools, so a grammar makes it call them.
Its template reads tools, calls and results."""

import json
import urllib.request

import jsonschema
import pytest
from patience import PATIENCE_S
from server_process import ServerProcess

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
FUNCTION = {"name": "get_weather", "description": "The weather of a city", "parameters": SCHEMA}
OTHER = {"name": "get_time", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}
TOOLS = [{"type": "function", "function": function} for function in (FUNCTION, OTHER)]
QUESTION = {"role": "user", "content": "What is the weather in Paris?"}
NAMED = {"type": "function", "function": {"name": "get_weather"}}


@pytest.fixture(scope="module")
def server():
    with ServerProcess("--threads", "1", "--kv-cache-memory", "64M", "--seed", "1") as server:
        yield server


def post(server, path, **body):
    body = {"model": server.model(), "stream": False, **body}
    body = {name: value for name, value in body.items() if value is not None}
    request = urllib.request.Request(
        server.base_url + path, json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
        return json.load(response)


def check(name, arguments):
    arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    assert name in ("get_weather", "get_time")
    jsonschema.validate(arguments, SCHEMA if name == "get_weather" else OTHER["parameters"])


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_chat_completions(server, choice):
    body = {"tools": TOOLS, "tool_choice": choice, "max_tokens": 400, "parallel_tool_calls": False}
    message = post(server, "/v1/chat/completions", messages=[QUESTION], **body)["choices"][0]["message"]
    (call,) = message["tool_calls"]
    check(**call["function"])
    if choice == NAMED:
        assert call["function"]["name"] == "get_weather"
    result = {"role": "tool", "tool_call_id": call["id"], "content": "sunny"}
    again = post(
        server, "/v1/chat/completions", messages=[QUESTION, message, result], tools=TOOLS, max_tokens=8
    )
    assert again["choices"][0]["message"]["content"]
    # A conversation that had tools continues without them.
    post(server, "/v1/chat/completions", messages=[QUESTION, message, result, QUESTION], max_tokens=8)


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
def test_messages(server, choice):
    tools = [
        {"name": function["name"], "input_schema": function["parameters"]} for function in (FUNCTION, OTHER)
    ]
    body = {"tools": tools, "max_tokens": 400}
    choice = choice | {"disable_parallel_tool_use": True}
    message = post(server, "/v1/messages", messages=[QUESTION], tool_choice=choice, **body)
    assert message["stop_reason"] == "tool_use"
    (use,) = [block for block in message["content"] if block["type"] == "tool_use"]
    check(use["name"], use["input"])
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use["id"], "content": "sunny"}]}
    turn = {"role": "assistant", "content": message["content"]}
    assert post(server, "/v1/messages", messages=[QUESTION, turn, result], **body)["content"]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "get_weather"}])
def test_responses(server, choice):
    tools = [{"type": "function", **function} for function in (FUNCTION, OTHER)]
    body = {"tools": tools, "max_output_tokens": 400, "parallel_tool_calls": False}
    response = post(server, "/v1/responses", input="What is the weather in Paris?", tool_choice=choice, **body)
    (call,) = [item for item in response["output"] if item["type"] == "function_call"]
    check(call["name"], call["arguments"])
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}
    again = post(server, "/v1/responses", input=[QUESTION, call, result], **body)
    assert again["output"]


def test_api_chat(server):
    # Ollama's API cannot require a call, so the model may answer with text.
    options = {"num_predict": 30}
    answer = post(server, "/api/chat", messages=[QUESTION], tools=TOOLS, options=options)
    assert answer["message"]["content"] or answer["message"]["tool_calls"]
    call = {"function": {"name": "get_weather", "arguments": {"city": "Paris", "days": 1}}}
    turns = [
        QUESTION,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_name": "get_weather", "content": "sunny"},
    ]
    assert post(server, "/api/chat", messages=turns, tools=TOOLS, options=options)["message"]["content"]
    shown = post(server, "/api/show", stream=None)
    assert "tools" in shown["capabilities"]


def test_the_template_writes_tools_only_where_there_are_some(server):
    def written(**body):
        return post(server, "/apply-template", **body)["prompt"]

    plain = written(messages=[{"role": "system", "content": "Be brief."}, QUESTION])
    assert plain == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is the weather in Paris?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    call = {"id": "a", "type": "function", "function": {"name": "get_time", "arguments": "{}"}}
    turns = [
        {"role": "system", "content": "Be brief."},
        QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call, call | {"id": "b"}]},
        {"role": "tool", "tool_call_id": "a", "content": "1"},
        {"role": "tool", "tool_call_id": "b", "content": "2"},
    ]
    with_tools = written(messages=turns, tools=TOOLS[1:])
    before, _, behind = with_tools.partition("<|im_start|>user\nWhat is the weather in Paris?<|im_end|>\n")
    assert before.startswith("<|im_start|>system\nBe brief.\n\n") and before.count("<|im_start|>") == 1
    tool = before.split("<tools>\n")[1].split("\n</tools>")[0]
    assert json.loads(tool) == TOOLS[1]
    assert behind == (
        '<|im_start|>assistant\n<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>\n'
        '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
