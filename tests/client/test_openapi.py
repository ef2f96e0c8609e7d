"""Tests `/openapi.json`: that it is an OpenAPI document, and that requests and answers match it."""

import json
import urllib.error
import urllib.request

import jsonschema
import openapi_spec_validator
import pytest
from anthropic.types.message_count_tokens_params import MessageCountTokensParams
from anthropic.types.message_create_params import MessageCreateParamsBase
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsBase
from openai.types.responses.response_create_params import ResponseCreateParamsBase
from patience import PATIENCE_S
from server_process import ServerProcess

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
REQUESTS = [
    ("/v1/chat/completions", CHAT | {"max_tokens": 3, "n": 2, "return_token_ids": True}),
    ("/v1/chat/completions", CHAT | {"max_tokens": 3, "logprobs": True, "top_logprobs": 2}),
    ("/v1/completions", {"prompt": ["Once", [1, 2, 3]], "max_tokens": 3, "logprobs": 1}),
    ("/v1/responses", {"input": "Hi", "max_output_tokens": 3, "top_logprobs": 1}),
    ("/v1/responses", {"input": [{"role": "user", "content": "Hi"}], "max_output_tokens": 3}),
    ("/v1/messages", CHAT | {"max_tokens": 3, "system": [{"type": "text", "text": "Be kind."}]}),
    ("/v1/messages/count_tokens", CHAT),
    ("/api/chat", CHAT | {"stream": False, "options": {"num_predict": 3}}),
    ("/api/generate", {"prompt": "Hi", "stream": False, "options": {"num_predict": 3}, "keep_alive": "5m"}),
    ("/api/show", {}),
    ("/tokenize", {"prompt": "a fox", "return_token_strs": True}),
    ("/tokenize", CHAT),
    ("/tokenize", {"content": "a fox"}),
    ("/tokenize", {"content": "a fox", "with_pieces": True, "add_special": True}),
    ("/detokenize", {"tokens": [268, 1527]}),
    ("/completion", {"prompt": "Once", "n_predict": 3, "n_probs": 1, "repeat_last_n": -1}),
    ("/completions", {"prompt": ["Once", [1, 2, 3]], "n_predict": 3, "json_schema": None}),
    ("/embedding", {"content": ["a fox", "b"], "embd_normalize": -1}),
    ("/pooling", {"input": "a fox", "encoding_format": "base64"}),
    ("/apply-template", CHAT),
    ("/api/pull", {"stream": False, "model": None, "name": "corella-nano"}),
]
FAULTS = [
    ("/v1/chat/completions", CHAT | {"temperature": -1}),
    ("/v1/chat/completions", CHAT | {"temprature": 1}),
    ("/v1/completions", {"max_tokens": 3}),
    ("/v1/completions", {"prompt": "Once", "messages": []}),
    ("/v1/responses", {"input": "Hi", "background": True}),
    ("/api/generate", {"prompt": "Hi", "options": {"temprature": 1}}),
    ("/api/chat", {"messages": [{"role": "robot", "content": "Hi"}]}),
    ("/v1/messages", CHAT),
    ("/v1/messages/count_tokens", {"messages": []}),
    ("/detokenize", {"tokens": ["a"]}),
    ("/completion", {"prompt": "Once", "mirostat": 2}),
    ("/infill", {"input_prefix": 3}),
    ("/embedding", {"content": "a", "embd_normalize": 0}),
]
# The minimal body of each endpoint, and the parameters of its official client.
CLIENTS = [
    ("/v1/chat/completions", CHAT | {"max_tokens": 1}, ChatParams),
    ("/v1/completions", {"prompt": "Once", "max_tokens": 1}, CompletionCreateParamsBase),
    ("/v1/responses", {"input": "Hi", "max_output_tokens": 1}, ResponseCreateParamsBase),
    ("/v1/messages", CHAT | {"max_tokens": 1}, MessageCreateParamsBase),
    ("/v1/messages/count_tokens", CHAT, MessageCountTokensParams),
]
# Anthropic's client sends these as headers.
HEADERS = {"user_profile_id", "workspace_id"}


@pytest.fixture(scope="module")
def server():
    with ServerProcess() as server:
        yield server


@pytest.fixture(scope="module")
def document(server):
    return ask(server, "/openapi.json")[1]


def ask(server, path, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        server.base_url + path, data, {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def is_valid(document, schema, value):
    schema = schema | {"components": document["components"]}
    return jsonschema.Draft202012Validator(schema).is_valid(value)


def operation(document, path):
    return document["paths"][path]["post"]


def body_schema(document, path):
    return operation(document, path)["requestBody"]["content"]["application/json"]["schema"]


def answer_schema(document, path, status, method="post"):
    answers = document["paths"][path][method]["responses"]
    return answers[status]["content"]["application/json"]["schema"]


def test_it_is_an_openapi_document(document):
    assert document["openapi"].startswith("3.1")
    openapi_spec_validator.validate(document)


@pytest.mark.parametrize("path,body", REQUESTS)
def test_what_it_describes_is_answered_as_it_says(server, document, path, body):
    assert is_valid(document, body_schema(document, path), body)
    status, answer = ask(server, path, body)
    assert status == 200, answer
    assert is_valid(document, answer_schema(document, path, "200"), answer), answer


@pytest.mark.parametrize("path,body", FAULTS)
def test_what_it_rules_out_is_refused_as_it_says(server, document, path, body):
    assert not is_valid(document, body_schema(document, path), body)
    status, answer = ask(server, path, body)
    assert status == 400, answer
    assert is_valid(document, answer_schema(document, path, "default"), answer), answer


def test_answers_without_a_body_are_as_it_says(server, document):
    model = server.model()
    for path, asked in [
        ("/v1/models", "/v1/models"),
        ("/v1/models/{model}", f"/v1/models/{model}"),
        ("/version", "/version"),
        ("/models", "/models"),
        ("/props", "/props"),
        ("/slots", "/slots?fail_on_no_slot=1"),
        ("/load", "/load"),
        ("/api/tags", "/api/tags"),
        ("/api/ps", "/api/ps"),
        ("/api/version", "/api/version"),
    ]:
        status, answer = ask(server, asked)
        assert status == 200
        assert is_valid(document, answer_schema(document, path, "200", "get"), answer), answer


@pytest.mark.parametrize("path,body,params", CLIENTS)
def test_every_parameter_of_a_client_is_known(server, path, body, params):
    names = set(params.__annotations__) - HEADERS
    assert names > set(body)
    for name in names - set(body):
        status, answer = ask(server, path, body | {name: None})
        assert status == 200, answer
