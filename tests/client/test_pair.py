"""Tests prefill and decode on different nodes: same answers, and the loss of nodes."""

import concurrent.futures
import json
import os
import socket
import urllib.error
import urllib.request

import golden_model
import openai
import pytest
from fleet import (
    KV_CONNECTIONS,
    ROW_BYTES,
    SLOW,
    THREADS,
    Etcd,
    Fleet,
    complete,
    complete_greedily,
    complete_remotely,
    num_remote_tokens,
    num_steps,
    prompt_of,
    random_requests,
    stream,
    text_of,
    wait_at_rest,
    wait_for_decode_nodes,
)
from pairing_proxy import post
from patience import held
from server_process import ServerProcess

# Number of requests compared over each transport. `CORELLA_ORACLE_REQUESTS=500` takes a few minutes.
NUM_REQUESTS = int(os.environ.get("CORELLA_ORACLE_REQUESTS", 60))
# Between two bursts of requests a decode node gets this many probes, one a second, and no requests.
# `CORELLA_SILENCE_PROBES=35` is a longer silence.
SILENCE_PROBES = int(os.environ.get("CORELLA_SILENCE_PROBES", 3))


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_a_fleet_answers_as_one_server_does(transport):
    cluster = ("--transport", transport, *THREADS)
    asked = list(random_requests(NUM_REQUESTS))
    with Etcd() as etcd, Fleet(f"etcd:{etcd.address}/corella") as fleet:
        alone = fleet.enter_context(ServerProcess(*THREADS))
        decode = [fleet.decode(*cluster) for _ in range(2)]
        prefill = [fleet.prefill(*cluster, num_decode_nodes=2) for _ in range(2)]
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            answers = [
                pool.submit(complete, prefill[at % 2], prompt, **options)
                for at, (prompt, options) in enumerate(asked)
            ]
            expected = [
                pool.submit(complete, alone, prompt, **options) for prompt, options in asked
            ]
            for (prompt, options), answer, lone in zip(asked, answers, expected):
                assert answer.result() == lone.result(), (prompt, options)
        for server in decode:
            assert num_steps(server) > 0, "both decode nodes have worked"
        num_tokens = alone.metric("corella_generation_tokens_total")
        num_remote = sum(num_remote_tokens(server) for server in prefill)
        print(f"{num_remote:.0f} of {num_tokens:.0f} tokens are from decode nodes")
        for server in prefill:
            hits = server.metric("corella_prefix_cache_hit_tokens_total", source="cached")
            assert hits > 0, "the prefill nodes found prefixes"
        num_sent = sum(server.metric("corella_kv_sent_bytes_total") for server in prefill)
        num_rows = sum(len(prompt) for prompt, options in asked if options["max_tokens"] > 1)
        assert num_sent < num_rows * ROW_BYTES * 0.9, "the decode nodes found prefixes"
        wait_at_rest(*decode, *prefill)


def test_a_mixed_pair_answers_alike_however_rows_travel():
    small = ("--dtype", "int4", "--kv-cache-dtype", "int8", "--block-size", 32)
    asked = list(random_requests(20, seed=2))
    answers = []
    # Rows are sent in other pieces when the prompt is computed in chunks, and when a prefix is present already.
    for way in [
        ("--transport", "tcp"),
        ("--transport", "shm"),
        ("--transport", "tcp", "--max-prefill-tokens", 24, "--no-enable-prefix-caching"),
    ]:
        with Fleet() as fleet:
            decode = fleet.decode(*THREADS, *way, *small)
            prefill = fleet.prefill(*THREADS, *way)
            # The prefill node has other weights, so that no single process gives these answers.
            answers.append([complete_remotely(prefill, prompt, **options) for prompt, options in asked])
            wait_at_rest(prefill, decode)
    assert answers[0] == answers[1] == answers[2]


def test_a_killed_decode_node_leaves_no_gap_in_a_stream():
    with Fleet() as fleet:
        decode = fleet.decode(*SLOW)
        prefill = fleet.prefill(*SLOW)
        chunks = stream(prefill, [400, 401, 402] * 20, 400)
        text = "".join(next(chunks).choices[0].text for _ in range(20))
        decode.kill()
        text += text_of(chunks)
        wait_at_rest(prefill)
        # No decode node is left, so one node does all of this.
        assert text == complete_greedily(prefill, [400, 401, 402] * 20, 400)


def test_a_decode_node_has_as_long_to_take_a_request_as_its_prefill_node_is_told():
    prompt = [400, 401, 402] * 20
    with Fleet() as fleet:
        decode = fleet.decode(*SLOW)
        patient = fleet.prefill(*SLOW)
        hasty = fleet.prefill(*SLOW, search_timeout=0.1)
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            with held(decode.process):
                answer = pool.submit(complete_greedily, patient, prompt, 5)
                text = complete_greedily(hasty, prompt, 5)
                assert not answer.done()
            assert answer.result() == text
        assert num_remote_tokens(hasty) == 0
        assert num_remote_tokens(patient) == 4
        assert hasty.metric("corella_pd_fallbacks_total", reason="not_taken") == 1
        assert patient.metric("corella_pd_fallbacks_total", reason="not_taken") == 0


def test_killed_nodes_leave_no_file_behind(tmp_path, monkeypatch):
    with Fleet() as fleet:
        monkeypatch.setenv("TMPDIR", str(tmp_path))
        inside_host = ("--transport", "shm", *THREADS)
        decode = fleet.decode(*inside_host)
        prefill = fleet.prefill(*inside_host)
        complete_remotely(prefill, [400] * 40, max_tokens=5)
        for server in (prefill, decode):
            server.kill()
    assert list(tmp_path.iterdir()) == []


def test_a_decode_node_that_is_told_to_go_finishes_what_it_has():
    with Fleet() as fleet:
        decode = fleet.decode(*SLOW)
        prefill = fleet.prefill(*SLOW)
        chunks = stream(prefill, [400, 401, 402], 300)
        text = next(chunks).choices[0].text
        decode.terminate()
        before = num_steps(prefill)
        text += text_of(chunks)
        assert num_steps(prefill) - before < 100, "most of it came from the decode node"
        assert decode.wait() == 0
        # From now on, the prefill node serves requests itself.
        assert text == complete_greedily(prefill, [400, 401, 402], 300)


def test_connections_are_made_before_requests_and_outlast_silence():
    with Fleet() as fleet:
        decode, sessions = fleet.decode_behind_proxy(*THREADS)
        prefill, rows = fleet.prefill_behind_proxy(*THREADS)

        def made():
            return sessions.num_connections, rows.num_connections

        assert made() == (1, KV_CONNECTIONS)
        for num_probes in (0, SILENCE_PROBES):
            for _ in range(num_probes):
                num_bytes = sessions.num_bytes
                prefill.wait_until(lambda: sessions.num_bytes > num_bytes, "the decode node says how it is")
            with concurrent.futures.ThreadPoolExecutor(8) as pool:
                list(pool.map(lambda seed: complete_greedily(prefill, prompt_of(50, seed), 5), range(16)))
        assert num_remote_tokens(prefill) > 0
        assert made() == (1, KV_CONNECTIONS)
        # Lost connections are restored without any request.
        for proxy in (sessions, rows):
            proxy.cut()
        prefill.wait_until(lambda: made() == (2, 2 * KV_CONNECTIONS), "all are connected again")
        wait_for_decode_nodes(prefill, 1)
        now = made()
        complete_greedily(prefill, prompt_of(50), 5)
        assert made() == now
        wait_at_rest(prefill, decode)


def test_stages_are_measured_and_both_logs_name_the_request(monkeypatch):
    monkeypatch.setenv("RUST_LOG", "corella_cluster=debug")
    # The link is slow enough to be measured, and faster than computing the prompt.
    link = ("--transport", "tcp", "--transfer-max-bandwidth", "20M")
    on_prefill = [
        "allocate_seconds",
        "prefill_seconds",
        "transfer_seconds",
        "transfer_hidden_share",
        "handover_seconds",
    ]
    on_decode = ["reserve_seconds", "load_seconds", "first_decode_seconds"]
    with Fleet() as fleet:
        decode = fleet.decode(*SLOW, *link)
        prefill = fleet.prefill(*SLOW, *link)

        def counts():
            return [prefill.metric(f"corella_pd_{name}_count") for name in on_prefill] + [
                decode.metric(f"corella_pd_{name}_count") for name in on_decode
            ]

        assert counts() == [0] * 8
        for number in range(1, 3):
            header = {"x-request-id": f"trace-{number}"}
            prompt = [400 + number, 500, 600] * 100
            complete(prefill, prompt, max_tokens=5, extra_headers=header)
            assert counts() == [number] * 8
            assert f"trace-{number}" in prefill.log()
            assert f"trace-{number}" in decode.log()
        assert prefill.metric("corella_pd_prefill_seconds_sum") > 0
        assert prefill.log().count("MB/s, by its first transfer") == 1


def test_a_decode_node_tells_of_adapters_at_work(tmp_path):
    """Gateways learn from vLLM's metrics where an adapter is, and how large a cache is."""
    folder = golden_model.make("llama-gqa-tied", tmp_path / "model")
    adapters = ("--lora-modules", f"other={golden_model.GOLDEN / 'adapters' / 'llama-all'}")
    with Fleet() as fleet:
        decode = fleet.decode(folder, *SLOW, *adapters)
        prefill = fleet.prefill(folder, *SLOW, *adapters)

        def at_work(node, names):
            return node.metric("vllm:lora_requests_info", max_lora="16", running_lora_adapters=names) > 0

        def is_told():
            chunks = stream(prefill, prompt_of(30, tokens=range(3, 80)), 450, model="other")
            next(chunks)
            next(chunks)
            # The request may have ended before the check.
            told = at_work(decode, "other")
            chunks.close()
            return told

        assert at_work(decode, "") and not at_work(decode, "other")
        decode.wait_until(is_told, "the adapter is told")
        wait_at_rest(prefill, decode)
        decode.wait_until(lambda: at_work(decode, ""), "none is told")
        for node in (prefill, decode):
            assert node.metric("vllm:cache_config_info", block_size="16") == 1


def test_a_decode_node_counts_what_it_decodes():
    prompt = prompt_of(50)
    with Fleet() as fleet:
        decode = fleet.decode(*THREADS)
        prefill = fleet.prefill(*THREADS, "--next-turn", "prefill")
        complete_greedily(prefill, prompt, 9, complete=complete_remotely)
        wait_at_rest(prefill, decode)

        def counted(name, **labels):
            return decode.metric(f"vllm:{name}", **labels)

        # The prefill node computes the prompt and the first token.
        assert counted("generation_tokens_total") == 8
        assert counted("inter_token_latency_seconds_count") == 7
        assert counted("request_time_per_output_token_seconds_count") == 1
        assert counted("request_generation_tokens_sum") == 8
        assert counted("request_success_total", finished_reason="length") == 1
        assert decode.metric("corella_received_prompt_tokens_total") == len(prompt)
        for name in ("prompt_tokens_total", "time_to_first_token_seconds_count", "request_prefill_time_seconds_count"):
            assert counted(name) == 0, name
        assert prefill.metric("vllm:generation_tokens_total") == 9
        # The decode node already has a page of the prompt's beginning.
        complete_greedily(prefill, prompt, 9, complete=complete_remotely)
        wait_at_rest(prefill, decode)
        num_received = decode.metric("corella_received_prompt_tokens_total") - len(prompt)
        assert 0 < num_received < len(prompt)
        assert counted("generation_tokens_total") == 16
        # A client that leaves ends its request on the decode node, too.
        chunks = stream(prefill, prompt, 1500)
        for _ in range(20):
            next(chunks)
        chunks.close()
        decode.wait_until(lambda: counted("request_success_total", finished_reason="abort") == 1, "it is aborted")
        wait_at_rest(prefill, decode)


def test_what_stays_on_the_prefill_node_is_counted_by_reason(monkeypatch):
    monkeypatch.setenv("RUST_LOG", "corella_cluster=debug")
    with Fleet() as fleet:
        prefill = fleet.prefill(*THREADS, "--disaggregate-min-tokens", 20, num_decode_nodes=0)

        def stays(reason):
            return prefill.metric("corella_pd_stays_total", reason=reason)

        asked = {"short": 10, "no_room": 30}
        for reason, num_tokens in asked.items():
            assert stays(reason) == 0
            header = {"x-request-id": f"because-{reason}"}
            complete(prefill, prompt_of(num_tokens), max_tokens=2, extra_headers=header)
            assert stays(reason) == 1
            (line,) = [line for line in prefill.log().splitlines() if f"because-{reason}" in line and "stays" in line]
            assert reason in line
        assert stays("slow_link") == 0


def test_a_port_in_use_is_one_line():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(AssertionError, match=f"cannot listen on --cluster-listen {address}"):
            ServerProcess("--role", "decode", "--cluster-listen", address)


NO_FALLBACK = ("--fallback", "none")


def test_without_fallback_a_request_that_no_node_takes_is_refused():
    with Fleet() as fleet:
        options = ("--disaggregate-min-tokens", 4, *NO_FALLBACK, *THREADS)
        prefill = fleet.prefill(*options, num_decode_nodes=0, ready_path="/health")
        for stream in (False, True):
            with pytest.raises(openai.InternalServerError) as error:
                prefill.client.completions.create(
                    model=prefill.model(), prompt=[400] * 20, max_tokens=3, stream=stream
                )
            assert (error.value.status_code, error.value.code) == (503, "no_decode_node")
            assert "no decode node takes the request" in error.value.message
            assert int(error.value.response.headers["retry-after"]) >= 1
        # Anthropic's and Ollama's clients get the same error in their forms.
        messages = [{"role": "user", "content": "Tell me a story about a fox and a lantern."}]
        for path, limit in [("/v1/messages", {"max_tokens": 3}), ("/api/chat", {"options": {"num_predict": 3}})]:
            status, headers, answer = post(
                prefill.port, path, {"model": prefill.model(), "messages": messages, **limit}
            )
            assert status == 503 and int(headers["retry-after"]) >= 1, answer
            assert b"no decode node takes the request" in answer, answer
        assert num_steps(prefill) == 0
        # The operator gets the fleet's state once a minute.
        assert prefill.log().count("no decode node has room for a request") == 1
        assert "num_nodes=0" in prefill.log()
        # Short prompts belong on this node.
        assert complete(prefill, [400] * 3, max_tokens=3)[0][1] == "length"
        fleet.decode(*THREADS)
        wait_for_decode_nodes(prefill, 1)
        assert complete(prefill, [400] * 20, max_tokens=3)[0][1] == "length"


def test_without_fallback_a_node_is_ready_while_a_decode_node_is_there():
    """A load balancer sends requests to a node that is ready, and without a decode node, this node would refuse all of
    them."""
    with Fleet() as fleet:
        prefill = fleet.prefill(*NO_FALLBACK, *THREADS, num_decode_nodes=0, ready_path="/health")

        def becomes(status, what):
            prefill.wait_until(lambda: prefill.status_of("/ready") == status, what)

        assert prefill.status_of("/ready") == 503
        with urllib.request.urlopen(prefill.base_url + "/health") as response:
            assert response.status == 200
        with pytest.raises(urllib.error.HTTPError) as error:
            urllib.request.urlopen(prefill.base_url + "/ready")
        answer = json.loads(error.value.read())["error"]
        assert answer["code"] == "not_ready" and "--fallback none" in answer["message"]
        for _ in range(2):
            decode = fleet.decode(*THREADS)
            becomes(200, "a decode node is there")
            complete(prefill, [400] * 20, max_tokens=3)
            decode.kill()
            becomes(503, "no decode node is there any more")
        # A node with a fallback needs no decode node.
        assert fleet.prefill(*THREADS, num_decode_nodes=0).status_of("/ready") == 200


def test_without_fallback_a_stream_ends_when_its_decode_node_is_lost():
    with Fleet() as fleet:
        decode = fleet.decode(*SLOW)
        prefill = fleet.prefill(*SLOW, *NO_FALLBACK)
        stream = prefill.client.completions.create(
            model=prefill.model(),
            prompt=[400, 401, 402] * 20,
            stream=True,
            max_tokens=400,
            temperature=0,
            extra_body={"ignore_eos": True},
        )
        for _ in range(20):
            next(stream)
        decode.kill()
        with pytest.raises(openai.APIError) as error:
            for chunk in stream:
                assert chunk.choices[0].finish_reason is None
        assert error.value.code == "decode_lost"
