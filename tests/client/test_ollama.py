"""Tests `/api/chat`, `/api/generate` and related endpoints with Ollama's own Python client."""

import asyncio
import json
import urllib.error
import urllib.request

import byte_model
import httpx
import jsonschema
import ollama
import pytest
from patience import PATIENCE_S
from server_process import ServerProcess
from test_tools import CITY, ONE_CALL, QUESTION, TWO_CALLS, WEATHER
from test_tools import client as dictated

GREEDY = {"temperature": 0, "num_predict": 24}
# Names in OpenAI's API and in Ollama's.
SAMPLING = [
    ({"temperature": 0.7, "seed": 3}, {"temperature": 0.7, "seed": 3}),
    ({"temperature": 1, "top_k": 4, "seed": 5}, {"temperature": 1, "top_k": 4, "seed": 5}),
    ({"temperature": 1, "top_p": 0.6, "seed": 7}, {"temperature": 1, "top_p": 0.6, "seed": 7}),
    ({"temperature": 2, "min_p": 0.2, "seed": 9}, {"temperature": 2, "min_p": 0.2, "seed": 9}),
    ({"temperature": 0, "repetition_penalty": 1.8}, {"temperature": 0, "repeat_penalty": 1.8}),
    ({"temperature": 0, "presence_penalty": 1.5}, {"temperature": 0, "presence_penalty": 1.5}),
    ({"temperature": 0, "frequency_penalty": 1.5}, {"temperature": 0, "frequency_penalty": 1.5}),
]
EXTENSIONS = {"top_k", "min_p", "repetition_penalty"}


@pytest.fixture(scope="module")
def client(served):
    return ollama.Client(host=served.server.base_url)


def openai_text(served, fields, max_tokens=24):
    extra = {name: value for name, value in fields.items() if name in EXTENSIONS}
    fields = {name: value for name, value in fields.items() if name not in EXTENSIONS}
    return served.client.chat.completions.create(
        model=served.model, messages=served.messages, max_tokens=max_tokens, extra_body=extra, **fields
    )


def post(url, body):
    request = urllib.request.Request(url, json.dumps(body).encode())
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


@pytest.mark.parametrize("theirs,ours", SAMPLING)
def test_a_chat_draws_what_openais_api_draws(served, client, theirs, ours):
    whole = openai_text(served, theirs)
    options = ours | {"num_predict": 24}
    answer = client.chat(served.model, served.messages, options=options)
    assert answer.message.role == "assistant"
    assert answer.message.content == whole.choices[0].message.content
    assert answer.done and answer.done_reason == whole.choices[0].finish_reason
    assert answer.prompt_eval_count == whole.usage.prompt_tokens
    assert answer.eval_count == whole.usage.completion_tokens
    assert answer.total_duration >= answer.prompt_eval_duration + answer.eval_duration > 1
    assert answer.load_duration == 0


def test_a_stream_is_the_default_and_adds_up_to_the_whole(served, client):
    whole = client.chat(served.model, served.messages, options=GREEDY)
    url = f"{served.server.base_url}/api/chat"
    body = {"model": served.model, "messages": served.messages, "options": GREEDY}
    with httpx.stream("POST", url, json=body, timeout=PATIENCE_S) as response:
        assert response.headers["content-type"] == "application/x-ndjson"
        lines = [json.loads(line) for line in response.iter_lines()]
    assert len(lines) > 4
    assert "".join(line["message"]["content"] for line in lines) == whole.message.content
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    assert lines[-1]["eval_count"] == whole.eval_count
    parts = list(client.chat(served.model, served.messages, options=GREEDY, stream=True))
    assert "".join(part.message.content for part in parts) == whole.message.content
    assert parts[-1].done_reason == whole.done_reason


def test_a_generation_is_a_chat_of_one_message(served, client):
    chat = client.chat(
        served.model, [{"role": "system", "content": served.text[:9]}, *served.messages], options=GREEDY
    )
    answer = client.generate(served.model, served.text, system=served.text[:9], options=GREEDY)
    assert answer.response == chat.message.content
    assert answer.prompt_eval_count == chat.prompt_eval_count
    parts = list(client.generate(served.model, served.text, options=GREEDY, stream=True))
    alone = client.generate(served.model, served.text, options=GREEDY)
    assert "".join(part.response for part in parts) == alone.response
    assert alone.prompt_eval_count < answer.prompt_eval_count


def test_a_seed_of_minus_one_is_none(served, client):
    def ask(seed):
        options = {"seed": seed, "temperature": 1, "num_predict": 24}
        return client.generate(served.model, served.text, options=options).response

    assert len({ask(7) for _ in range(3)}) == 1
    assert len({ask(-1) for _ in range(3)}) > 1


def test_a_raw_prompt_is_continued_as_it_is(served, client):
    completion = served.client.completions.create(
        model=served.model, prompt=served.text, max_tokens=24, temperature=0
    )
    answer = client.generate(served.model, served.text, raw=True, options=GREEDY)
    assert answer.response == completion.choices[0].text
    assert answer.prompt_eval_count == completion.usage.prompt_tokens


def test_a_stop_string_ends_the_answer(served, client):
    whole = client.chat(served.model, served.messages, options=GREEDY).message.content
    stop = whole[3:6]
    answer = client.chat(served.model, served.messages, options=GREEDY | {"stop": [stop]})
    assert answer.message.content == whole[: whole.index(stop)]
    assert answer.done_reason == "stop"


def test_logprobs_are_those_of_openais_api(served, client):
    whole = openai_text(served, {"temperature": 0, "logprobs": True, "top_logprobs": 2})
    expected = [
        (row.token, row.logprob, [(top.token, top.logprob) for top in row.top_logprobs])
        for row in whole.choices[0].logprobs.content
    ]

    fields = {"options": GREEDY, "logprobs": True, "top_logprobs": 2}
    whole = client.chat(served.model, served.messages, **fields).logprobs
    parts = client.chat(served.model, served.messages, stream=True, **fields)
    for rows in [whole, [row for part in parts for row in part.logprobs or []]]:
        assert len(rows) == len(expected)
        for row, (token, logprob, alternatives) in zip(rows, expected):
            assert (row.token, row.logprob) == (token, pytest.approx(logprob))
            assert [(top.token, pytest.approx(top.logprob)) for top in row.top_logprobs] == alternatives


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def test_a_format_is_followed(served, client):
    if served.model != "corella-nano":
        pytest.skip("the golden model has no tokens for JSON")
    options = {"temperature": 1, "seed": 1, "num_predict": 200}
    for ask in [
        lambda format: client.chat(served.model, served.messages, format=format, options=options).message.content,
        lambda format: client.generate(served.model, served.text, format=format, options=options).response,
        lambda format: client.generate(served.model, served.text, raw=True, format=format, options=options).response,
    ]:
        jsonschema.validate(json.loads(ask(SCHEMA)), SCHEMA)
    with pytest.raises(ollama.ResponseError, match="^format: "):
        client.chat(served.model, served.messages, format={"type": "strange"})


def test_models_are_listed_shown_and_loaded(served, client):
    (model,) = client.list().models
    assert model.model == f"{served.model}:latest"
    assert model.modified_at.year > 2000 and len(model.digest) == 64
    (running,) = client.ps().models
    assert running.model == model.model and running.context_length > 0
    assert running.expires_at.year == 9999
    shown = client.show(served.model)
    assert "completion" in shown.capabilities
    family = shown.modelinfo["general.architecture"]
    assert family == shown.details.family == model.details.family
    assert shown.modelinfo[f"{family}.context_length"] == running.context_length
    with pytest.raises(ollama.ResponseError) as error:
        client.show("other")
    assert error.value.status_code == 404
    loaded = client.generate(served.model, keep_alive=-1)
    assert (loaded.response, loaded.done_reason) == ("", "load")
    assert client.chat(served.model, []).done_reason == "load"
    # Ollama's name for a model without a tag.
    tagged = client.generate(f"{served.model}:latest", served.text, options=GREEDY)
    assert tagged.response == client.generate(served.model, served.text, options=GREEDY).response


def test_a_model_without_a_template_has_another_path(tmp_path):
    folder = byte_model.make(tmp_path / "plain", "", ["<|end|>"], ends=["<|end|>"])
    (folder / "tokenizer_config.json").write_text("{}")
    with ServerProcess(folder, "--device", "mock") as server:
        status, answer = post(server.base_url + "/api/chat", {"messages": [{"role": "user", "content": "a"}]})
        assert status == 400 and "use /api/generate" in answer["error"], answer


REFUSED = [
    ("/api/chat", {"messages": [{"role": "user", "content": "a", "images": ["aGk="]}]}, "messages[0].images"),
    ("/api/chat", {"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role"),
    ("/api/generate", {"prompt": "a", "images": ["aGk="]}, "images"),
    ("/api/generate", {"prompt": "a", "template": "{{ .Prompt }}"}, "template"),
    ("/api/generate", {"prompt": "a", "context": [1, 2]}, "context"),
    ("/api/generate", {"prompt": "a", "raw": True, "system": "b"}, "system"),
    ("/api/generate", {"prompt": "a", "sufix": "b"}, "suffix"),
    ("/api/generate", {"prompt": "a", "options": {"temprature": 1}}, "temperature"),
    ("/api/generate", {"prompt": "a", "options": {"temperature": -1}}, "options.temperature"),
    ("/api/generate", {"prompt": "a", "options": {"repeat_penalty": -1}}, "options.repeat_penalty"),
    ("/api/generate", {"prompt": "a", "options": {"top_k": "x"}}, "options.top_k"),
    ("/api/generate", {"prompt": "a", "options": {"mirostat": 2}}, "options.mirostat"),
    ("/api/embed", {"input": "a", "options": {"frequency_penalty": 3}}, "options.frequency_penalty"),
    ("/api/embeddings", {"options": {"repeat_penalty": 0}}, "options.repeat_penalty"),
    ("/api/chat", {"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    ("/api/generate", {"prompt": "a", "options": {"temperature": 3.5e38}}, "options.temperature"),
    ("/api/generate", {"prompt": "a", "options": {"temperature": -5e-324}}, "options.temperature"),
    ("/api/generate", {"prompt": "a", "options": {"top_p": 1.0000000000000002}}, "options.top_p"),
    ("/api/generate", {"prompt": "a", "temperature": 1}, "options"),
    ("/api/generate", {"prompt": "a", "think": 3}, "think"),
    ("/api/generate", {"prompt": "a", "format": "xml"}, "format"),
]


@pytest.mark.parametrize("path,body,named", REFUSED)
def test_what_cannot_be_served_is_named(served, path, body, named):
    status, answer = post(served.server.base_url + path, body)
    assert status == 400, answer
    assert list(answer) == ["error"]
    assert named in answer["error"], answer


@pytest.mark.parametrize("method,path,status", [("POST", "/api/create", 404), ("DELETE", "/api/delete", 404), ("GET", "/api/chat", 405)])
def test_what_is_not_there_is_refused_in_ollamas_shape(served, method, path, status):
    answer = httpx.request(method, served.server.base_url + path)
    assert answer.status_code == status
    assert list(answer.json()) == ["error"] and path in answer.json()["error"]


def test_an_answer_may_be_allowed_more_tokens_than_fit(served, client):
    # An end token may end the answer before the context is full.
    context = client.ps().models[0].context_length
    whole = client.generate(served.model, served.text, options={"seed": 1})
    for num_predict in [context - 1, 10 * context, 2**40]:
        answer = client.generate(served.model, served.text, options={"seed": 1, "num_predict": num_predict})
        assert (answer.response, answer.done_reason) == (whole.response, whole.done_reason)
        assert answer.prompt_eval_count + answer.eval_count <= context


def test_what_an_ollama_client_sends_for_its_machine_is_accepted(served):
    for num_ctx in [16, 10_000_000]:
        machine = {"num_gpu": 1, "num_thread": 4, "num_ctx": num_ctx, "num_keep": 4, "use_mmap": True, "num_predict": 2}
        body = {"prompt": served.text, "options": machine, "stream": False, "keep_alive": "5m"}
        assert post(f"{served.server.base_url}/api/generate", body)[0] == 200


def test_the_served_model_is_pulled_and_told_of(served, client):
    assert client.pull(served.model).status == "success"
    [model, *_] = client.list().models
    assert model.size > 0
    assert model.details.family and model.details.parameter_size and model.details.quantization_level
    with pytest.raises(ollama.ResponseError, match="corella pull owner/other"):
        client.pull("owner/other")


def test_unknown_fields_pass_where_they_are_allowed():
    with ServerProcess("--allow-unknown-fields") as server:
        body = {"prompt": "a", "stream": False, "wish": 1, "options": {"num_predict": 1, "hope": 2}}
        assert post(f"{server.base_url}/api/generate", body)[0] == 200


KEYS = """
[[key]]
name = "one"
key = "sk-one-3f1c9a7e5b2d4068"
requests-per-minute = 2

[[key]]
name = "other"
key = "sk-other-9b0c21d4e8f7a635"
models = ["nothing"]
"""


def test_keys_and_their_limits_count(tmp_path):
    (tmp_path / "keys.toml").write_text(KEYS)

    def client(server, key):
        return ollama.Client(host=server.base_url, headers={"authorization": f"Bearer {key}"})

    with ServerProcess("--api-keys", tmp_path / "keys.toml") as server:
        with pytest.raises(ollama.ResponseError) as error:
            client(server, "wrong").list()
        assert error.value.status_code == 401 and "API key" in error.value.error
        assert client(server, "sk-other-9b0c21d4e8f7a635").list().models == []
        one = client(server, "sk-one-3f1c9a7e5b2d4068")
        (model,) = one.list().models
        with pytest.raises(ollama.ResponseError) as error:
            client(server, "sk-other-9b0c21d4e8f7a635").generate(model.model, "a", options=GREEDY)
        assert error.value.status_code == 404
        for _ in range(2):
            assert one.generate(model.model, "a", options=GREEDY).done
        with pytest.raises(ollama.ResponseError) as error:
            one.generate(model.model, "a", options=GREEDY)
        assert error.value.status_code == 429 and "2 requests per minute" in error.value.error


def host_of(dictated):
    return str(dictated.base_url).removesuffix("/v1/")


def test_a_tool_is_called_answered_and_read(dictated):
    client, model = ollama.Client(host=host_of(dictated)), dictated.models.list().data[0].id

    def ask(seed, messages, stream=False):
        options = {"seed": seed, "num_predict": 500}
        return client.chat(model, messages, tools=[WEATHER], options=options, stream=stream)

    whole = ask(ONE_CALL, QUESTION)
    parts = list(ask(ONE_CALL, QUESTION, stream=True))
    for messages in [[whole.message], [part.message for part in parts]]:
        assert "".join(message.thinking or "" for message in messages) == "Hm, été."
        assert "".join(message.content for message in messages) == "I look."
        (call,) = [call for message in messages for call in message.tool_calls or []]
        assert (call.function.name, call.function.arguments) == ("get_weather", CITY)
    assert whole.done_reason == parts[-1].done_reason == "stop"
    answered = [*QUESTION, whole.message, {"role": "tool", "tool_name": "get_weather", "content": "Rain"}]
    assert ask(ONE_CALL, answered).prompt_eval_count > whole.prompt_eval_count
    calls = ask(TWO_CALLS, QUESTION).message.tool_calls
    assert [call.function.arguments for call in calls] == [CITY, CITY]
    streamed = [call for part in ask(TWO_CALLS, QUESTION, stream=True) for call in part.message.tool_calls or []]
    assert [call.function.arguments for call in streamed] == [CITY, CITY]


def test_a_python_function_is_a_tool(dictated):
    def get_weather(city: str) -> str:
        """Tells the weather.

        Args:
          city: The name of the city
        """
        return f"Rain in {city}"

    client, model = ollama.Client(host=host_of(dictated)), dictated.models.list().data[0].id
    answer = client.chat(model, QUESTION, tools=[get_weather], options={"seed": ONE_CALL, "num_predict": 500})
    (call,) = answer.message.tool_calls
    assert get_weather(**call.function.arguments) == f"Rain in {CITY['city']}"


async def ask_in_time(base_url, model, prompt):
    client = ollama.AsyncClient(host=base_url)
    parts = [part async for part in await client.generate(model, prompt, options=GREEDY, stream=True)]
    return "".join(part.response for part in parts)


def test_vectors_are_those_of_openais_api(served, client):
    texts = [served.text, 2 * served.text]
    theirs = served.client.embeddings.create(model=served.model, input=texts)
    ours = client.embed(served.model, texts)
    assert ours.prompt_eval_count == theirs.usage.prompt_tokens
    for vector, expected in zip(ours.embeddings, theirs.data, strict=True):
        assert vector == pytest.approx(expected.embedding, abs=1e-6)
    one = client.embed(served.model, texts[0], dimensions=8).embeddings
    assert [len(vector) for vector in one] == [8]
    older = client.embeddings(served.model, texts[0]).embedding
    length = sum(x * x for x in older) ** 0.5
    assert [x / length for x in older] == pytest.approx(theirs.data[0].embedding, abs=1e-6)


def test_the_async_client_gets_the_same(served, client):
    text = asyncio.run(ask_in_time(served.server.base_url, served.model, served.text))
    assert text == client.generate(served.model, served.text, options=GREEDY).response
