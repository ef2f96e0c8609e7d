"""`vllm.Inference` by Google's runtime, compared with the answers of `/v1/completions`."""

import json
import urllib.request

import grpc
import pytest
from grpc_call import failure, stream, unary
from patience import PATIENCE_S
from test_grpc import grpc_server
from wire_message import classes

VLLM = classes("vllm", "vllm")
Request, Response = VLLM["GenerateRequest"], VLLM["GenerateResponse"]
GENERATE, STREAM = "/vllm.Inference/Generate", "/vllm.Inference/GenerateStream"
PROMPT = [40, 51, 62, 73, 84]
LENGTH, STOP = 1, 2


@pytest.fixture(scope="module")
def server():
    with grpc_server() as server:
        yield server


def post(server, body, path="/v1/completions"):
    request = urllib.request.Request(
        server.base_url + path, json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
        return json.load(response)


def request_of(prompt=PROMPT, **fields):
    return Request(token_ids={"ids": prompt}, **fields)


def streamed(server, request, **metadata):
    """Returns the messages of a stream, after the checks that Dynamo's sidecar makes."""
    sent = request.SerializeToString()
    messages = [Response.FromString(data) for data in stream(server.channel, STREAM, sent, **metadata)]
    first, *rest = messages
    assert first.HasField("prompt_info") and not first.HasField("outputs")
    assert first.prompt_info.num_prompt_tokens == len(request.token_ids.ids)
    asked = request.response
    total = 0
    for message in rest:
        assert not message.HasField("prompt_info")
        outputs = message.outputs
        total += outputs.num_tokens
        if asked.output_token_ids:
            assert len(outputs.token_ids) == outputs.num_tokens
        if asked.output_logprobs:
            assert len(outputs.logprobs) == len(outputs.ranks) == len(outputs.candidate_tokens) == outputs.num_tokens
        assert outputs.HasField("finish_info") == (message is rest[-1])
    finish = rest[-1].outputs.finish_info
    assert finish.num_output_tokens == total
    assert finish.finish_reason in (LENGTH, STOP)
    assert finish.HasField("num_cached_tokens")
    return first.prompt_info, [message.outputs for message in rest], finish


ALL = {"output_token_ids": True, "output_logprobs": True, "output_candidates": {"top_n": 3}}

SAME = [
    ({}, {}),
    ({"temperature": 0.8, "sampling": {"seed": 7}}, {"temperature": 0.8, "seed": 7}),
    (
        {"temperature": 1.2, "sampling": {"seed": 3, "top_k": 20, "top_p": 0.5, "min_p": 0.25}},
        {"temperature": 1.2, "seed": 3, "top_k": 20, "top_p": 0.5, "min_p": 0.25},
    ),
    (
        {"decoding": {"presence_penalty": 1.5, "frequency_penalty": -0.5, "repetition_penalty": 1.25}},
        {"presence_penalty": 1.5, "frequency_penalty": -0.5, "repetition_penalty": 1.25},
    ),
    ({"decoding": {"logit_bias": {99: 100.0}}}, {"logit_bias": {"99": 100}}),
    ({"decoding": {"allowed_token_ids": [70, 71, 72]}}, {"allowed_token_ids": [70, 71, 72]}),
    ({"decoding": {"choice": {"choices": ["yes", "no"]}}}, {"guided_choice": ["yes", "no"]}),
    ({"decoding": {"regex": "[0-9]{4}"}}, {"guided_regex": "[0-9]{4}"}),
    ({"decoding": {"json": '{"type": "integer"}'}}, {"guided_json": {"type": "integer"}}),
    ({"decoding": {"grammar": 'root ::= "ab" | "cd"'}}, {"guided_grammar": 'root ::= "ab" | "cd"'}),
    ({"decoding": {"json_object": True}}, {"guided_json_object": True}),
    ({"stopping": {"ignore_eos": True, "min_new_tokens": 20}}, {"ignore_eos": True, "min_tokens": 20}),
    ({"stopping": {"stop_strings": ["e"]}}, {"stop": ["e"]}),
    (
        {"stopping": {"stop_strings": ["e"], "include_stop_strings": True}},
        {"stop": "e", "include_stop_str_in_output": True},
    ),
]


@pytest.mark.parametrize(("fields", "http"), SAME, ids=[",".join(http) or "greedy" for _, http in SAME])
def test_an_answer_is_that_of_completions(server, fields, http):
    request = request_of(response=ALL, **fields)
    request.stopping.max_new_tokens = 24
    body = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0, "return_token_ids": True, "logprobs": 3}
    expected = post(server, body | http)
    choice = expected["choices"][0]
    _, outputs, finish = streamed(server, request)
    tokens = [token for output in outputs for token in output.token_ids]
    assert tokens == choice["token_ids"]
    assert "".join(output.text for output in outputs) == choice["text"]
    # Each token leaves alone, whether it has text or not.
    # At the end of a format no token may follow, so the last message may have none.
    lengths = [output.num_tokens for output in outputs]
    ends_with_token = lengths == [1] * len(tokens)
    assert ends_with_token or lengths == [1] * len(tokens) + [0]
    logprobs = [logprob for output in outputs for logprob in output.logprobs]
    # Completions leave out the end token.
    expected_logprobs = choice["logprobs"]["token_logprobs"]
    assert len(logprobs) - len(expected_logprobs) in (0, 1)
    assert logprobs[: len(expected_logprobs)] == pytest.approx(expected_logprobs)
    for output in outputs[: len(tokens)]:
        ids = [candidate.id for candidate in output.candidate_tokens[0].tokens]
        assert output.token_ids[0] not in ids
        # A format may leave fewer tokens.
        most = 2 if output.ranks[0] <= 3 else 3
        assert len(ids) <= most if "decoding" in fields else len(ids) == most
    assert (finish.finish_reason == LENGTH) == (choice["finish_reason"] == "length")
    reason = finish.WhichOneof("stop_reason")
    if isinstance(choice["stop_reason"], str):
        assert finish.stop_string == choice["stop_reason"]
    elif finish.finish_reason == STOP:
        assert reason == ("eos_token_id" if ends_with_token else None)
        assert not ends_with_token or finish.eos_token_id == tokens[-1]
    whole = Response.FromString(unary(server.channel, GENERATE, request.SerializeToString()))
    assert list(whole.outputs.token_ids) == tokens
    assert whole.outputs.text == choice["text"]
    assert whole.outputs.finish_info.WhichOneof("stop_reason") == reason
    assert list(whole.outputs.logprobs) == logprobs
    assert whole.prompt_info.num_prompt_tokens == len(PROMPT)


def test_the_end_of_an_answer_says_what_ended_it(server):
    _, outputs, _ = streamed(server, request_of(response=ALL, stopping={"max_new_tokens": 6}))
    tokens = [output.token_ids[0] for output in outputs]
    _, stopped, finish = streamed(
        server, request_of(response=ALL, stopping={"max_new_tokens": 6, "stop_token_ids": [tokens[2]]})
    )
    assert finish.WhichOneof("stop_reason") == "stop_token_id"
    assert finish.stop_token_id == tokens[2] == stopped[-1].token_ids[0]
    banned = {"bad_words_token_ids": [{"ids": tokens[:1]}]}
    _, others, _ = streamed(server, request_of(response=ALL, decoding=banned, stopping={"max_new_tokens": 6}))
    assert tokens[0] not in [output.token_ids[0] for output in others]


def test_log_probabilities_of_the_prompt(server):
    asked = {"prompt_token_ids": True, "prompt_logprobs": True, "prompt_candidates": {"top_n": 2}}
    info, _, _ = streamed(server, request_of(response=asked, stopping={"max_new_tokens": 1}))
    expected = post(server, {"prompt": PROMPT, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 2})
    expected = expected["choices"][0]["prompt_logprobs"]
    assert list(info.token_ids) == PROMPT
    assert info.logprobs[0] == 0 and info.ranks[0] == 0 and not info.candidate_tokens[0].tokens
    assert len(info.candidate_tokens) == len(PROMPT)
    for at in range(1, len(PROMPT)):
        entry = expected[at][str(PROMPT[at])]
        assert info.logprobs[at] == pytest.approx(entry["logprob"])
        assert info.ranks[at] == entry["rank"]
        others = {candidate.id: candidate.rank for candidate in info.candidate_tokens[at].tokens}
        assert others == {int(id): other["rank"] for id, other in expected[at].items() if int(id) != PROMPT[at]}


def test_several_sequences_of_a_stream_have_their_indices(server):
    request = request_of(temperature=1.0, sampling={"num_sequences": 3, "seed": 1}, stopping={"max_new_tokens": 5})
    sent = request.SerializeToString()
    outputs = [Response.FromString(data).outputs for data in stream(server.channel, STREAM, sent)][1:]
    finished = sorted(output.index for output in outputs if output.HasField("finish_info"))
    assert finished == [0, 1, 2]
    code, details = failure(server.channel, GENERATE, sent)
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert details.startswith("sampling.num_sequences:")


def test_text_and_parts_of_the_answer(server):
    request = Request(text="Once upon a time", stopping={"max_new_tokens": 5})
    sent = request.SerializeToString()
    answer = Response.FromString(unary(server.channel, GENERATE, sent))
    expected = post(server, {"prompt": "Once upon a time", "max_tokens": 5, "temperature": 0})
    assert answer.outputs.text == expected["choices"][0]["text"]
    assert not answer.outputs.token_ids and not answer.outputs.logprobs and not answer.prompt_info.token_ids
    request.response.output_text = False
    assert not Response.FromString(unary(server.channel, GENERATE, request.SerializeToString())).outputs.text


REFUSED = [
    ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
    ({"media": [{}]}, "media"),
    ({"kv": {"ec_transfer_params": {"a": 1}}}, "kv.ec_transfer_params"),
    ({"kv": {"kv_transfer_params": {"do_remote_decode": True}}}, "kv.kv_transfer_params"),
    ({"stopping": {"thinking_token_budget": 0}}, "stopping.thinking_token_budget"),
    ({"stopping": {"stop_token_ids": [1 << 30]}}, "stopping.stop_token_ids"),
    ({"decoding": {"structural_tag": "{}"}}, "decoding.structural_tag"),
    ({"decoding": {"json": "{"}}, "decoding.json"),
    ({"decoding": {"presence_penalty": 3.0}}, "decoding.presence_penalty"),
    ({"decoding": {"bad_words_token_ids": [{}]}}, "decoding.bad_words_token_ids"),
    ({"sampling": {"top_p": 0.0}}, "sampling.top_p"),
    ({"response": {"output_candidates": {"all": True}}}, "response.output_candidates"),
    ({"response": {"output_candidates": {"top_n": 9999}}}, "response.output_candidates"),
]


@pytest.mark.parametrize(("fields", "place"), REFUSED, ids=[place for _, place in REFUSED])
def test_what_cannot_be_served_is_refused_by_its_place(server, fields, place):
    code, details = failure(server.channel, STREAM, request_of(**fields).SerializeToString())
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert details.startswith(place)


def test_prompts_models_and_ranks_are_checked(server):
    def refusal(request, **metadata):
        return failure(server.channel, GENERATE, request.SerializeToString(), **metadata)[0]

    assert refusal(Request()) == grpc.StatusCode.INVALID_ARGUMENT
    assert refusal(request_of(prompt=[1 << 30])) == grpc.StatusCode.INVALID_ARGUMENT
    assert refusal(request_of(model="another")) == grpc.StatusCode.NOT_FOUND
    assert refusal(request_of(lora_name="another")) == grpc.StatusCode.NOT_FOUND
    assert refusal(request_of(), **{"x-data-parallel-rank": "1"}) == grpc.StatusCode.INVALID_ARGUMENT
    assert failure(server.channel, GENERATE, b"\xff")[0] == grpc.StatusCode.INVALID_ARGUMENT
    few = request_of(model=server.model(), stopping={"max_new_tokens": 1}).SerializeToString()
    assert unary(server.channel, GENERATE, few, **{"x-data-parallel-rank": "0"})


def test_a_cancelled_stream_ends_its_request(server):
    request = request_of(stopping={"ignore_eos": True}).SerializeToString()
    call = stream(server.channel, STREAM, request)
    next(call)
    call.cancel()
    server.wait_until(lambda: server.metric("corella_num_requests_running") == 0, "nothing runs")


def test_a_bypass_finds_no_cached_prefix(server):
    prompt = [*range(40, 90)] * 2
    few = {"max_new_tokens": 1}
    _, _, finish = [streamed(server, request_of(prompt, stopping=few)) for _ in range(2)][1]
    assert finish.num_cached_tokens > 0
    _, _, finish = streamed(server, request_of(prompt, stopping=few, kv={"bypass_prefix_cache": True}))
    assert finish.num_cached_tokens == 0


WEB, GATEWAY = "sk-web-3f1c9a7e5b2d4068", "sk-gateway-77aa01f2c3d4"


def test_keys_and_their_limits_hold(tmp_path):
    keys = tmp_path / "keys.toml"
    keys.write_text(
        f'[[key]]\nname = "web"\nkey = "{WEB}"\n[[key]]\nname = "gateway"\nkey = "{GATEWAY}"\nrequests-per-minute = 1\n'
    )
    few = request_of(stopping={"max_new_tokens": 1}).SerializeToString()
    with grpc_server("--device", "mock", "--api-keys", keys) as server:
        assert failure(server.channel, GENERATE, few)[0] == grpc.StatusCode.UNAUTHENTICATED
        assert failure(server.channel, GENERATE, few, authorization="Bearer x")[0] == grpc.StatusCode.UNAUTHENTICATED
        assert unary(server.channel, GENERATE, few, authorization=f"Bearer {WEB}")
    with grpc_server("--device", "mock", "--api-keys", keys, "--grpc-api-key", "gateway") as server:

        def is_refused():
            # On a slow machine, the limit's minute may pass between two calls.
            try:
                return not unary(server.channel, GENERATE, few)
            except grpc.RpcError as error:
                assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
                return True

        assert not is_refused()
        server.wait_until(is_refused, "a call above the limit is refused")
        assert failure(server.channel, GENERATE, few, authorization="Bearer x")[0] == grpc.StatusCode.UNAUTHENTICATED
        assert unary(server.channel, GENERATE, few, authorization=f"Bearer {WEB}")
