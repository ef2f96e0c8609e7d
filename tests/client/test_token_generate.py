"""Plays llm-d's coordinator with its format of tokens: it renders a request, asks a decode node that must have the
prompt, and turns to a prefill node if the decode node lacks it."""

import http.client
import json

from fleet import THREADS
from pairing_proxy import ASK_FOR_TRANSFER, post
from patience import PATIENCE_S
from server_process import ServerProcess

NODE = ("--cluster-listen", "127.0.0.1:0", *THREADS)
GENERATE = "/inference/v1/generate"
IF_AVAILABLE = {"prefer": "if-available", "epp-profile": "decode"}
CHAT = {"messages": [{"role": "user", "content": "Tell me a story about a fox and a lantern in the snow. " * 3}],
        "max_tokens": 20, "temperature": 0, "ignore_eos": True}


def asked(server, path, body, headers=()):
    status, _, answer = post(server.port, path, body, more_headers=headers)
    assert status == 200, answer
    return json.loads(answer)


def text_of(server, tokens):
    return asked(server, "/detokenize", {"tokens": tokens})["prompt"]


def with_params(rendered, **params):
    return {**rendered, "sampling_params": {**rendered["sampling_params"], **params}}


def test_a_coordinator_turns_to_a_prefill_node_only_if_the_decode_node_lacks_the_prompt():
    with ServerProcess(*NODE) as prefill, ServerProcess(*NODE) as decode:
        rendered = asked(decode, "/v1/chat/completions/render", CHAT)
        num_prompt_tokens = len(rendered["token_ids"])
        status, _, answer = post(decode.port, GENERATE, rendered, more_headers=IF_AVAILABLE)
        assert status == 412 and b"prompt_not_cached" in answer
        asks = with_params(rendered, max_tokens=1, extra_args={"kv_transfer_params": ASK_FOR_TRANSFER})
        kept = asked(prefill, GENERATE, asks)["kv_transfer_params"]
        assert kept["do_remote_prefill"] is True
        pulls = with_params(rendered, extra_args={"kv_transfer_params": kept})
        first = asked(decode, GENERATE, pulls)
        assert decode.metric("corella_kv_pulls_total", outcome="loaded") == 1
        # The decode node has the prompt from now on.
        second = asked(decode, GENERATE, rendered, IF_AVAILABLE)
        cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached >= (num_prompt_tokens - 1) // 16 * 16
        expected = asked(prefill, "/v1/chat/completions", CHAT)
        for answer in (first, second):
            choice = answer["choices"][0]
            assert choice["finish_reason"] == expected["choices"][0]["finish_reason"]
            assert text_of(decode, choice["token_ids"]) == expected["choices"][0]["message"]["content"]
        # The coordinator's default: the conversation with its tokens.
        tokens = {"token_ids": rendered["token_ids"], "features": None}
        same = asked(decode, "/v1/chat/completions", {**CHAT, "tokens": tokens}, IF_AVAILABLE)
        assert same["choices"][0]["message"] == expected["choices"][0]["message"]


def test_a_stream_ends_when_its_client_leaves():
    with ServerProcess(*THREADS) as server:
        body = {"token_ids": [400, 401, 402], "stream": True, "sampling_params": {"ignore_eos": True}}
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
        connection.request("POST", GENERATE, json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        first = json.loads(response.readline().removeprefix(b"data: "))
        assert len(first["choices"][0]["token_ids"]) >= 1
        connection.close()
        response.close()
        server.wait_until(lambda: server.metric("corella_kv_pages_in_use") == 0, "its pages are free")
