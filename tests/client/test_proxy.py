"""Tests two nodes that a proxy pairs by `kv_transfer_params`: same answers, and faults of the pair."""

import concurrent.futures
import contextlib
import itertools
import json
import socket
import tempfile

import golden_model
import openai
import pytest
from patience import PATIENCE_S, wait_until
from pairing_proxy import ASK_FOR_TRANSFER, KV_SOURCE, PairingProxy, post
from server_process import ServerProcess
from wander import site_of
from fleet import LOAD_TIMEOUT_S, random_requests

THREADS = ("--threads", 1)
NODE = ("--cluster-listen", "127.0.0.1:0", "--kv-load-timeout", round(LOAD_TIMEOUT_S * 1000), *THREADS)
MESSAGES = [{"role": "user", "content": "Tell me a story about a fox and a lantern."}]
PROMPT = [400 + at % 50 for at in range(90)]
ANSWER = {"max_tokens": 20, "temperature": 0, "ignore_eos": True}


@contextlib.contextmanager
def pair(*arguments, prefill_arguments=()):
    """Yields a proxy in front of two nodes, and a client of the proxy."""
    with contextlib.ExitStack() as stack:
        prefill = stack.enter_context(ServerProcess(*NODE, *arguments, *prefill_arguments))
        decode = stack.enter_context(ServerProcess(*NODE, *arguments))
        yield stack.enter_context(PairingProxy(prefill, decode))


def client_of(proxy):
    return openai.OpenAI(base_url=proxy.base_url + "/v1", api_key="unused", max_retries=0, timeout=PATIENCE_S)


def complete(client, prompt, **options):
    answer = client.completions.create(model="corella-nano", prompt=prompt, **options)
    return [(choice.text, choice.finish_reason) for choice in answer.choices]


def answer_of(server, body=None, path="/v1/completions", **fields):
    """Returns text and usage of a greedy answer."""
    status, _, answer = post(server.port, path, {"prompt": PROMPT, **ANSWER, **(body or {}), **fields})
    assert status == 200, answer
    answer = json.loads(answer)
    return answer["choices"][0]["text"], answer["usage"]


def num_pulls(server, outcome):
    return server.metric("corella_kv_pulls_total", outcome=outcome)


def wait_for_rest(proxy):
    """Waits until neither node holds anything for the other."""
    for server in (proxy.prefill, proxy.decode):
        server.wait_until(
            lambda: server.metric("corella_kept_prompts") == 0
            and server.metric("corella_kv_pages_held") == 0,
            "nothing is kept for the other node",
        )


def test_a_sidecar_names_a_node_that_has_the_prompts_beginning():
    beginnings = itertools.count(300)
    with pair("--block-fetch", "always") as proxy, ServerProcess(*NODE) as source:
        proxy.p2p_port = site_of(source)["port"]
        kv_source = {"kv_request_id": "a-test", "remote_host": "127.0.0.1", "remote_port": proxy.p2p_port}

        def is_fetched(ask):
            prompt = [next(beginnings), *PROMPT]
            expected, _ = answer_of(source, prompt=prompt)
            text, usage = ask({"prompt": prompt, **ANSWER})
            assert text == expected
            # The prompt has 91 tokens and so 5 whole blocks.
            return usage["prompt_tokens_details"]["cached_tokens"] == 80

        def through_the_pair(body):
            # The endpoint picker names the serving port of the source.
            named = {KV_SOURCE: f"127.0.0.1:{source.port}"}
            status, _, answer = post(proxy.port, "/v1/completions", body, more_headers=named)
            assert status == 200, answer
            answer = json.loads(answer)
            return answer["choices"][0]["text"], answer["usage"]

        def without_prefill(body):
            return answer_of(proxy.decode, body, kv_transfer_params={"remote_kv_source": kv_source, "later": 1})

        # A busy machine may answer a lookup too late. The next prompt is requested then.
        wait_until(lambda: is_fetched(through_the_pair), "the prefill node has fetched a prompt")
        num_asked = next(beginnings) - 300
        assert num_pulls(proxy.decode, "loaded") == num_asked, "the prefill node has kept what it fetched"
        assert proxy.prefill.metric("corella_block_fetches_total", outcome="begun") >= 1
        wait_until(lambda: is_fetched(without_prefill), "the decode node has fetched a prompt")
        wait_for_rest(proxy)


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_a_pair_answers_as_one_server_does(transport):
    with pair("--transport", transport) as proxy, ServerProcess(*THREADS) as alone:
        client = client_of(proxy)
        with concurrent.futures.ThreadPoolExecutor(6) as pool:
            asked = list(random_requests(40))
            answers = [pool.submit(complete, client, prompt, **options) for prompt, options in asked]
            expected = [pool.submit(complete, alone.client, prompt, **options) for prompt, options in asked]
            for (prompt, options), answer, lone in zip(asked, answers, expected):
                assert answer.result() == lone.result(), (prompt, options)
        wait_for_rest(proxy)
        num_asked = sum(num_pulls(proxy.decode, outcome) for outcome in ("loaded", "cached"))
        assert num_asked == len(asked), "each prompt was pulled or cached"
        assert num_pulls(proxy.decode, "loaded") > len(asked) / 2
        num_loaded = num_pulls(proxy.decode, "loaded")
        # Rows cached on the decode node were not pulled.
        assert proxy.prefill.metric("corella_kept_prompts_ended_total", outcome="pulled") == num_loaded


def test_streams_and_conversations_are_as_on_one_server(monkeypatch):
    monkeypatch.setenv("RUST_LOG", "corella_cluster=debug,corella_server=debug")
    with pair() as proxy, ServerProcess(*THREADS) as alone:
        client = client_of(proxy)

        def streamed(client, **options):
            chunks = client.chat.completions.create(
                model="corella-nano", messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **options
            )
            text, usage = "", None
            for chunk in chunks:
                text += "".join(choice.delta.content or "" for choice in chunk.choices)
                usage = chunk.usage or usage
            return text, usage.completion_tokens

        def whole(client, **options):
            answer = client.chat.completions.create(model="corella-nano", messages=MESSAGES, **options)
            return answer.choices[0].message.content, answer.usage.completion_tokens

        for options in [
            {"temperature": 0, "max_tokens": 30},
            {"temperature": 1, "seed": 5, "max_completion_tokens": 30},
            # The proxy sets `max_tokens` below `min_tokens`.
            {"temperature": 1, "seed": 6, "max_tokens": 20, "extra_body": {"min_tokens": 10}},
        ]:
            options["extra_headers"] = {"x-request-id": "streams-and-more"}
            assert streamed(client, **options) == streamed(alone.client, **options)
            assert whole(client, **options) == whole(alone.client, **options)
        assert len(proxy.transfer_params) == 6 and all(proxy.transfer_params)
        assert all(sent == echoed == "streams-and-more" for sent, echoed in proxy.request_ids)
        assert num_pulls(proxy.decode, "loaded") + num_pulls(proxy.decode, "cached") == 6
        assert num_pulls(proxy.decode, "loaded") >= 1
        for server in (proxy.prefill, proxy.decode):
            assert "streams-and-more" in server.log()


def test_cached_tokens_are_those_that_were_not_computed():
    with pair() as proxy:
        first, usage = answer_of(proxy.prefill, kv_transfer_params=ASK_FOR_TRANSFER, max_tokens=1)
        assert usage["prompt_tokens_details"]["cached_tokens"] == 0
        second, usage = answer_of(proxy)
        assert usage["prompt_tokens"] == len(PROMPT) and usage["completion_tokens"] == 20
        # The proxy reports the prefill node's cached tokens.
        assert usage["prompt_tokens_details"]["cached_tokens"] == len(PROMPT) - 1
        assert second.startswith(first)
        # The decode node has cached the prompt by now, for a direct request.
        _, usage = answer_of(proxy.decode)
        assert usage["prompt_tokens_details"]["cached_tokens"] > 0


def test_a_prefill_node_that_dies_between_the_steps_changes_nothing():
    with pair() as proxy:
        expected, _ = answer_of(proxy.decode, {"prompt": PROMPT[:64]})
        post(proxy.decode.port, "/reset_prefix_cache", {})
        proxy.between = proxy.prefill.kill
        assert answer_of(proxy, {"prompt": PROMPT[:64]})[0] == expected
        assert num_pulls(proxy.decode, "failed") == 1
        # The same parameters fail once more. The log has one line a minute for such failures.
        params = proxy.transfer_params[-1]
        post(proxy.decode.port, "/reset_prefix_cache", {})
        again, _ = answer_of(proxy.decode, {"prompt": PROMPT[:64]}, kv_transfer_params=params)
        assert again == expected
        assert num_pulls(proxy.decode, "failed") == 2
        assert proxy.decode.log().count("cannot use what 127.0.0.1:") == 1
        # The prefill node does not answer the first step.
        assert answer_of(proxy, {"prompt": PROMPT[:64]})[0] == expected
        assert proxy.decode.metric("corella_kv_pages_held") == 0


def test_a_prefill_node_that_is_told_to_go_first_hands_over_what_it_keeps():
    with pair() as proxy, ServerProcess(*THREADS) as alone:
        proxy.between = proxy.prefill.terminate
        assert answer_of(proxy)[0] == answer_of(alone)[0]
        assert num_pulls(proxy.decode, "loaded") == 1
        assert proxy.prefill.wait() == 0


def test_a_lease_that_is_over_changes_nothing():
    with pair(prefill_arguments=("--kv-hold-lease", 4)) as proxy:
        kept = lambda: proxy.prefill.metric("corella_kept_prompts")

        def expire():
            proxy.prefill.wait_until(lambda: kept() == 0, "the lease is over")

        proxy.between = expire
        answer, _ = answer_of(proxy)
        wait_for_rest(proxy)
        assert proxy.prefill.metric("corella_kept_prompts_ended_total", outcome="expired") == 1
        assert num_pulls(proxy.decode, "failed") == 1
        assert answer == answer_of(proxy.prefill)[0]


def test_rows_of_another_model_or_prompt_or_engine_are_not_used(golden_folder):
    prompt = list(range(3, 60))
    with pair() as proxy, ServerProcess(golden_folder, *NODE) as other:
        status, _, answer = post(
            proxy.prefill.port,
            "/v1/completions",
            {"prompt": prompt, "max_tokens": 1, "kv_transfer_params": ASK_FOR_TRANSFER},
        )
        assert status == 200
        params = json.loads(answer)["kv_transfer_params"]
        expected, _ = answer_of(other, prompt=prompt)
        assert answer_of(other, prompt=prompt, kv_transfer_params=params)[0] == expected
        assert num_pulls(other, "unusable") == 1
        # The same number of tokens, one of them different.
        changed = [*prompt[:-1], 77]
        expected, _ = answer_of(proxy.decode, prompt=changed)
        assert answer_of(proxy.decode, prompt=changed, kv_transfer_params=params)[0] == expected
        foreign = {**params, "remote_engine_id": "7f3a", "tp_size": 8}
        expected, _ = answer_of(proxy.prefill, prompt=prompt)
        assert answer_of(proxy.decode, prompt=prompt, kv_transfer_params=foreign)[0] == expected
        assert num_pulls(proxy.decode, "unusable") == 2
        # None of these requests has used up the kept prompt.
        post(proxy.decode.port, "/reset_prefix_cache", {})
        assert answer_of(proxy.decode, prompt=prompt, kv_transfer_params=params)[0] == expected
        assert num_pulls(proxy.decode, "loaded") == 1


def adapters(**folders):
    """Returns the arguments for a server with adapters of the golden Llama, by name."""
    folder = golden_model.GOLDEN / "adapters"
    return ("--lora-modules", *(f"{name}={folder / of_it}" for name, of_it in folders.items()))


def test_adapters_are_pulled_by_their_contents(tmp_path):
    folder = golden_model.make("llama-gqa-tied", tmp_path)
    with contextlib.ExitStack() as stack:
        start = lambda *arguments: stack.enter_context(ServerProcess(folder, *arguments))
        prefill = start(*NODE, *adapters(poems="llama-all", mixed="llama-some", gone="llama-all"))
        decode = start(*NODE, *adapters(poems="llama-all", mixed="llama-all"))
        alone = start(*THREADS, *adapters(poems="llama-all"))
        proxy = stack.enter_context(PairingProxy(prefill, decode))
        prompts = [[(7 * at + length) % 200 for at in range(length)] for length in (5, 16, 40, 100)]
        sampled = {"temperature": 1, "seed": 3, "logprobs": 2}
        answers = []
        for prompt in prompts:
            for model in (alone.model(), "poems"):
                for options in ({}, sampled):
                    asked = {"prompt": prompt, "model": model, **options}
                    answers.append(answer_of(proxy, asked)[0])
                    assert answers[-1] == answer_of(alone, asked)[0], asked
        assert answers[0::4] != answers[2::4], "the adapter changes no answer"
        wait_for_rest(proxy)
        num_asked = sum(num_pulls(decode, outcome) for outcome in ("loaded", "cached"))
        assert num_asked == len(answers), "each prompt was pulled or cached"
        # The first request for a prompt and a model, with or without the adapter, is not cached.
        assert num_pulls(decode, "loaded") >= 2 * len(prompts)

        # The two nodes use one name for different adapters: the prompt is computed with the second node's.
        prompt = list(range(60, 160))
        assert answer_of(proxy, prompt=prompt, model="mixed")[0] == answer_of(alone, prompt=prompt, model="poems")[0]
        assert num_pulls(decode, "unusable") == 1
        assert "its adapter has other contents than the one here" in decode.log()
        # An adapter that only the first node has.
        status, _, answer = post(proxy.port, "/v1/completions", {"prompt": prompt, "model": "gone", **ANSWER})
        assert (status, json.loads(answer)["error"]["param"]) == (404, "model"), answer


def test_a_request_makes_no_node_connect_where_it_may_not():
    """Only nodes of this machine are allowed; 0.0.0.0 also leads there, but is none of its addresses."""
    with pair() as proxy, socket.create_server(("0.0.0.0", 0)) as elsewhere:
        expected, _ = answer_of(proxy)
        params = {k: v for k, v in proxy.transfer_params[-1].items() if k not in ("remote_socket", "remote_machine")}
        params |= {"remote_host": "0.0.0.0", "remote_port": elsewhere.getsockname()[1]}
        post(proxy.decode.port, "/reset_prefix_cache", {})
        assert answer_of(proxy.decode, kv_transfer_params=params)[0] == expected
        assert num_pulls(proxy.decode, "failed") == 1
        assert "--kv-peer-allow does not allow 0.0.0.0" in proxy.decode.log()
        elsewhere.setblocking(False)
        with pytest.raises(BlockingIOError):
            elsewhere.accept()


def test_nodes_of_a_registry_take_proxies_too():
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        registry = ("--registry", f"file:{folder}", *THREADS)
        decode = stack.enter_context(ServerProcess("--role", "decode", *registry))
        prefill = stack.enter_context(ServerProcess("--role", "prefill", *registry))
        alone = stack.enter_context(ServerProcess(*THREADS))
        proxy = stack.enter_context(PairingProxy(prefill, decode))
        assert answer_of(proxy)[0] == answer_of(alone)[0]
        assert num_pulls(decode, "loaded") == 1
        prefill.wait_until(lambda: prefill.metric("corella_kv_pages_held") == 0, "nothing is kept")
        # A decode node keeps nothing: a proxy then has the other node do everything.
        status, _, answer = post(
            decode.port, "/v1/completions", {"prompt": PROMPT, "kv_transfer_params": ASK_FOR_TRANSFER}
        )
        assert status == 200 and json.loads(answer)["kv_transfer_params"] is None
        # Both nodes serve a client of the prefill node as usual.
        assert answer_of(prefill, prompt=PROMPT[::-1])[0] == answer_of(alone, prompt=PROMPT[::-1])[0]


def test_wrong_parameters_are_named_and_errors_go_to_the_client():
    with pair() as proxy:

        def refusal(server, **fields):
            status, _, answer = post(server.port, "/v1/completions", {"prompt": "x", **fields})
            assert status == 400, answer
            return json.loads(answer)["error"]["param"]

        for params, field in [
            ("yes", "kv_transfer_params"),
            ({"do_remote_decode": 1}, "kv_transfer_params.do_remote_decode"),
            ({"do_remote_decode": True, "do_remote_prefill": True}, "kv_transfer_params.do_remote_prefill"),
            ({"do_remote_prefill": True}, "kv_transfer_params.remote_engine_id"),
            ({"do_remote_decode": True, "remote_port": "x"}, "kv_transfer_params.remote_port"),
        ]:
            assert refusal(proxy.decode, kv_transfer_params=params) == field
        assert refusal(proxy.prefill, kv_transfer_params=ASK_FOR_TRANSFER, stream=True) == "stream"
        # The proxy's client gets the prefill node's refusals.
        assert refusal(proxy, temperature=-1) == "temperature"
        status, _, _ = post(proxy.port, "/v1/completions", {"prompt": "x", "model": "another"})
        assert status == 404
        for harmless in (None, {}, {"do_remote_decode": False, "anything": 1}):
            status, _, _ = post(proxy.decode.port, "/v1/completions", {"prompt": "x", "kv_transfer_params": harmless})
            assert status == 200
