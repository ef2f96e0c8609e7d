"""Causes faults of prefill and decode nodes, one test for each rule of behaviour from 38 to 49.

Clients must get one process's answers, and living nodes must hold nothing afterwards. The time until a fault is noticed
is asserted in virtual time, by the tests that `docs/behaviours.md` names beside these. Rule 48, which takes longer, is
in `test_soak.py`.
"""

import concurrent.futures
import contextlib
import random
import re

import openai
import pytest
from fleet import (
    NO_MARKS,
    ROW_BYTES,
    SLOW,
    THREADS,
    Etcd,
    Fleet,
    ask,
    complete_greedily,
    complete_remotely,
    num_asked,
    num_decode_nodes,
    num_receiving,
    num_remote_tokens,
    num_steps,
    prompt_of,
    reported_free_pages,
    stream,
    text_of,
    wait_at_rest,
    wait_for_decode_nodes,
)
from patience import held, slowed, wait_until
from server_process import ServerProcess, free_port

# Chunks of a prompt take tens of milliseconds each, so that a fault can hit between two chunks.
CHUNKS = ("--max-prefill-tokens", 64)
NUM_TOKENS = 60
# The reasons for which a prefill node of two or more decode nodes may go on by itself.
FALLBACK_REASONS = ("peer_lost", "not_taken", "first_token_timed_out", "load_failed", "load_timed_out", "out_of_pages")
# Pairs of identical requests.
NUM_PAIRS = 60


@pytest.fixture(scope="module")
def alone():
    """Yields a function that returns the text of a single process."""
    with ServerProcess(*SLOW) as server:
        yield lambda prompt, num_tokens=NUM_TOKENS: complete_greedily(server, prompt, num_tokens)


@contextlib.contextmanager
def in_background(act, *arguments, **options):
    """Yields the future of a concurrent call, which may never return if the test fails."""
    pool = concurrent.futures.ThreadPoolExecutor(1)
    try:
        yield pool.submit(act, *arguments, **options)
    finally:
        pool.shutdown(wait=False)


def num_sent_bytes(prefill):
    return prefill.metric("corella_kv_sent_bytes_total")


def num_cached_pages(server):
    return server.metric("corella_kv_pages_cached")


def num_fallbacks(prefill, reason):
    return prefill.metric("corella_pd_fallbacks_total", reason=reason)


def test_38_decode_node_killed_while_it_is_sent_a_prompt_is_replaced_by_another(alone):
    prompt = prompt_of(500)
    with Fleet() as fleet:
        decode = [fleet.decode(*SLOW) for _ in range(2)]
        prefill = fleet.prefill(*SLOW, *CHUNKS, num_decode_nodes=2)
        with in_background(complete_greedily, prefill, prompt, NUM_TOKENS) as answer:
            wait_until(lambda: num_sent_bytes(prefill) > 0, "rows are on their way")
            with held(prefill.process):
                (victim,) = [node for node in decode if num_receiving(node) == 1]
                (other,) = [node for node in decode if node is not victim]
                assert num_asked(other) == 0
                victim.kill()
            assert answer.result() == alone(prompt)
        assert num_asked(other) == 1, "it is tried once more elsewhere"
        assert num_remote_tokens(prefill) == NUM_TOKENS - 1
        wait_at_rest(prefill, other)


def test_38_decode_node_killed_behind_the_first_token_is_replaced_by_the_prefill_node(alone):
    prompt = prompt_of(600)
    with Fleet() as fleet:
        decode = fleet.decode(*SLOW)
        prefill, proxy = fleet.prefill_behind_proxy(*SLOW)
        proxy.is_held = True
        chunks = stream(prefill, prompt, NUM_TOKENS)
        text = next(chunks).choices[0].text
        assert prefill.metric("corella_kv_pages_held") > 0
        decode.kill()
        text += text_of(chunks)
        assert text == alone(prompt)
        assert num_fallbacks(prefill, "peer_lost") == 1
        wait_at_rest(prefill)
        assert num_remote_tokens(prefill) == 0, "nothing of it was decoded there"


def test_38_decode_node_killed_behind_the_first_token_is_replaced_by_another(alone):
    """For each way to draw tokens, another decode node continues the answer of a lost one, twice, and the prefill node
    decodes nothing."""
    digits = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "minItems": 120}
    answer_format = {"type": "json_schema", "json_schema": {"name": "digits", "schema": digits}}
    ways = [
        {"temperature": 0},
        {"temperature": 1, "seed": 5, "logprobs": 2, "presence_penalty": 0.5},
        {"temperature": 1, "seed": 6, "logit_bias": {}, "extra_body": {"response_format": answer_format, "ignore_eos": False}},
    ]

    def start(server, number, way):
        options = {"model": server.model(), "max_tokens": 4 * NUM_TOKENS, "stream": True, "logit_bias": NO_MARKS} | way
        options["extra_body"] = {"ignore_eos": True} | way.get("extra_body", {})
        return server.client.completions.create(prompt=prompt_of(100 + number), **options)

    def read(chunks):
        return [chunk.choices[0] for chunk in chunks]

    def whole(choices):
        """Returns all that the client sees, however many tokens a chunk has."""
        logprobs = [number for choice in choices if choice.logprobs for number in choice.logprobs.token_logprobs]
        return "".join(choice.text for choice in choices), logprobs, choices[-1].finish_reason

    with ServerProcess(*SLOW) as single:
        wanted = [whole(read(start(single, number, way))) for number, way in enumerate(ways)]

    def moves():
        """Returns whether the prefill node has decoded nothing. A node on a busy machine may look lost."""
        with Fleet() as fleet:
            decode = [fleet.decode(*SLOW)]
            prefill = fleet.prefill(*SLOW)
            streams = [start(prefill, number, way) for number, way in enumerate(ways)]

            def has_fallen_back():
                return any(num_fallbacks(prefill, reason) for reason in FALLBACK_REASONS)

            def is_over():
                return has_fallen_back() or prefill.metric("corella_sessions") < len(ways)

            seen = [read([next(chunks) for _ in range(10)]) for chunks in streams]
            for _ in range(2):
                decode.append(fleet.decode(*SLOW))
                wait_for_decode_nodes(prefill, 2)
                decode[-2].kill()
                wait_until(lambda: prefill.metric("corella_num_requests_running") == 0 or is_over(), "no prompt is computed")
                # An answer can move to the next decode node once this one has sent a token.
                num_tokens = num_remote_tokens(prefill) + 3 * len(ways)
                wait_until(lambda: num_remote_tokens(prefill) > num_tokens or is_over(), "tokens come from the next node")
                wait_for_decode_nodes(prefill, 1)
            for so_far, chunks in zip(seen, streams, strict=True):
                so_far += read(chunks)
            assert [whole(choices) for choices in seen] == wanted
            wait_at_rest(prefill, decode[-1])
            return num_steps(decode[-1]) > 0 and not has_fallen_back()

    assert any(moves() for _ in range(5))


@pytest.mark.parametrize("limit", [("--max-queued-requests", 2), ("--max-queued-tokens", 70)], ids=["requests", "tokens"])
def test_38_streams_that_come_back_meet_no_limit_of_the_queue(alone, limit):
    prompts = [prompt_of(60 + i) for i in range(6)]
    with Fleet() as fleet:
        decode = fleet.decode(*SLOW)
        prefill, proxy = fleet.prefill_behind_proxy(*SLOW, "--max-num-seqs", 1, *limit)
        proxy.is_held = True
        streams, texts = [], []
        for prompt in prompts:
            # Requests are sent one after the other, because the queue's limits apply to new requests.
            streams.append(stream(prefill, prompt, NUM_TOKENS))
            texts.append(next(streams[-1]).choices[0].text)
        decode.kill()
        texts = [text + text_of(chunks) for text, chunks in zip(texts, streams, strict=True)]
        assert texts == [alone(prompt) for prompt in prompts]
        assert num_fallbacks(prefill, "peer_lost") == len(prompts)
        wait_at_rest(prefill)


def test_38_decode_node_that_stops_is_given_up_and_lets_go_when_it_wakes(alone):
    prompt = prompt_of(100)
    num_tokens = 150
    with Fleet() as fleet:
        decode = fleet.decode(*SLOW)
        prefill = fleet.prefill(*SLOW)
        chunks = stream(prefill, prompt, num_tokens)
        text = "".join(next(chunks).choices[0].text for _ in range(20))
        with held(decode.process):
            text += text_of(chunks)
            assert text == alone(prompt, num_tokens)
            assert num_fallbacks(prefill, "peer_lost") == 1
            # The decode node is suspect, or no longer in the registry, which forgets it some seconds later.
            assert num_decode_nodes(prefill, "healthy") == 0
            wait_at_rest(prefill)
        wait_at_rest(decode)
        wait_for_decode_nodes(prefill, 1)


@contextlib.contextmanager
def killed(server):
    server.kill()
    yield


@pytest.mark.parametrize("how", [killed, lambda server: held(server.process)], ids=["killed", "stopped"])
def test_39_what_a_lost_prefill_node_has_sent_is_never_found(alone, how):
    prompt = prompt_of(300)
    with Fleet() as fleet:
        decode = fleet.decode(*SLOW)
        lost, proxy = fleet.prefill_behind_proxy(*SLOW, *CHUNKS)
        num_cached_before = num_cached_pages(decode)
        proxy.hold_after(150 * ROW_BYTES)
        chunks = stream(lost, prompt, NUM_TOKENS)
        with in_background(lambda: list(chunks)) as answer:
            wait_until(lambda: proxy.is_held, "half of the rows have come through")
            wait_until(lambda: num_receiving(decode) == 1, "the decode node counts the load")
            with how(lost):
                wait_at_rest(decode)
                assert num_cached_pages(decode) == num_cached_before
                lost.kill()
            with pytest.raises(openai.OpenAIError):
                answer.result()
        before = num_steps(decode)
        other = fleet.prefill(*SLOW)
        assert complete_greedily(other, prompt, NUM_TOKENS, complete_remotely) == alone(prompt)
        assert num_steps(decode) - before <= NUM_TOKENS, "no prompt was computed there"
        wait_at_rest(decode, other)


def test_40_identical_requests_do_not_free_each_others_pages():
    numbers = random.Random(1)
    prompts = [prompt_of(numbers.randrange(1, 60), seed) for seed in range(NUM_PAIRS)]
    with Fleet() as fleet:
        lone = fleet.enter_context(ServerProcess(*THREADS))
        decode = [fleet.decode(*THREADS) for _ in range(2)]
        prefill = fleet.prefill(*THREADS, num_decode_nodes=2)

        def ask_once(index):
            # The client's own id does not identify the request's owner.
            headers = {"x-request-id": f"client-{index}"}
            num_tokens = 1 + index % 16
            return complete_greedily(prefill, prompts[index], num_tokens, extra_headers=headers)

        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            pairs = [
                [pool.submit(ask_once, index) for _ in range(2)]
                for index in range(len(prompts))
            ]
            expected = [
                pool.submit(complete_greedily, lone, prompt, 1 + index % 16)
                for index, prompt in enumerate(prompts)
            ]
            for (one, other), lone_text in zip(pairs, expected):
                assert one.result() == other.result() == lone_text.result()
        wait_at_rest(prefill, *decode)
        assert num_remote_tokens(prefill) > NUM_PAIRS


def test_41_kv_that_never_comes_is_not_waited_for(alone):
    prompt = prompt_of(200)
    with Fleet() as fleet:
        decode = fleet.decode(*SLOW, load_timeout=1.0)
        prefill, proxy = fleet.prefill_behind_proxy(*SLOW)
        num_cached_before = num_cached_pages(decode)
        proxy.is_held = True
        chunks = stream(prefill, prompt, NUM_TOKENS)
        text = next(chunks).choices[0].text
        wait_until(lambda: num_receiving(decode) == 0, "the load is given up")
        text += text_of(chunks)
        assert text == alone(prompt)
        assert num_fallbacks(prefill, "load_timed_out") == 1
        wait_at_rest(prefill, decode)
        assert num_cached_pages(decode) == num_cached_before
        # The held-back rows come late, and belong to no load.
        proxy.is_held = False
        other = prompt_of(200, seed=2)
        assert complete_greedily(prefill, other, NUM_TOKENS, complete_remotely) == alone(other)
        wait_at_rest(prefill, decode)


def test_42_pending_loads_hold_up_no_other(alone):
    num_loads, prompt_length = 8, 1900
    with Fleet() as fleet:
        decode = fleet.decode(*SLOW, "--transfer-threads", 1)
        busy = fleet.prefill(*SLOW, *CHUNKS)
        quick = fleet.prefill(*SLOW)
        # The prompts are computed one after the other, so that most loads wait all the time.
        with contextlib.ExitStack() as stack, slowed(busy):
            asked = [stack.enter_context(ask(busy, prompt_of(prompt_length, seed), 9)) for seed in range(num_loads)]
            wait_until(lambda: num_receiving(decode) == num_loads, "all loads wait")
            assert decode.status_of("/health") == 200
            prompt = prompt_of(20)
            assert complete_greedily(quick, prompt, 5, complete_remotely) == alone(prompt, 5)
            assert num_receiving(decode) >= 4, "four times as many loads wait as threads"
            while asked:
                num_before = num_receiving(decode)
                asked.pop().close()
                wait_until(lambda: num_receiving(decode) < max(num_before, 1), "a load is over")
        wait_at_rest(busy, quick, decode)
        assert num_steps(busy) < num_loads * prompt_length / 64, "loads ended without their prompts"


def test_43_a_client_that_leaves_before_the_decode_node_answers_costs_it_no_step():
    with Fleet() as fleet:
        decode = fleet.decode(*SLOW)
        prefill = fleet.prefill(*SLOW)
        with held(decode.process):
            with ask(prefill, prompt_of(1900), NUM_TOKENS):
                wait_until(lambda: prefill.metric("corella_sessions") == 1, "the request has come")
            wait_at_rest(prefill)
        wait_at_rest(decode)
        assert num_steps(decode) == 0
        assert num_cached_pages(decode) == 0


def test_43_a_client_that_leaves_while_its_prompt_is_computed_stops_that():
    prompt = prompt_of(1900)
    with Fleet() as fleet:
        decode = fleet.decode(*SLOW)
        prefill = fleet.prefill(*SLOW, *CHUNKS)
        with ask(prefill, prompt, NUM_TOKENS):
            wait_until(lambda: num_steps(prefill) >= 3, "the prompt is being computed")
        wait_at_rest(prefill, decode)
        assert num_steps(prefill) < len(prompt) / 64
        assert num_steps(decode) == num_cached_pages(decode) == 0


def test_43_a_client_that_leaves_while_its_prompt_is_sent_frees_both_nodes(monkeypatch):
    monkeypatch.setenv("RUST_LOG", "info,corella_cluster=trace")
    with Fleet() as fleet:
        decode = fleet.decode(*SLOW)
        prefill, proxy = fleet.prefill_behind_proxy(*SLOW)
        proxy.is_held = True
        before = num_steps(decode), num_cached_pages(decode)
        with ask(prefill, prompt_of(900), NUM_TOKENS):
            wait_until(lambda: prefill.metric("corella_kv_pages_held") > 0, "it is computed")
            wait_until(lambda: num_receiving(decode) == 1, "it is being sent")
        wait_at_rest(prefill, decode)
        assert (num_steps(decode), num_cached_pages(decode)) == before
        assert "Abort(Cancelled)" in prefill.log()


def test_43_a_client_that_leaves_while_it_is_answered_frees_both_nodes():
    with Fleet() as fleet:
        decode = fleet.decode(*SLOW)
        prefill = fleet.prefill(*SLOW)
        with ask(prefill, prompt_of(1000), 1000):
            wait_until(lambda: num_steps(decode) >= 20, "it is being answered")
        wait_at_rest(prefill, decode)
        assert num_steps(decode) < 1000


def test_44_a_slow_node_delays_no_other(alone):
    prompt = prompt_of(1200)
    with Fleet() as fleet:
        decode = fleet.decode(*SLOW)
        quick = fleet.prefill(*SLOW, "--transport", "tcp")
        seeds = iter(range(1000))

        def others_are_answered_meanwhile():
            slow, proxy = fleet.prefill_behind_proxy(*SLOW)
            proxy.is_held = True
            before = num_remote_tokens(quick)
            with in_background(complete_greedily, slow, prompt, NUM_TOKENS) as answer:
                wait_until(lambda: slow.metric("corella_kv_pages_held") > 0, "it is computed")
                # From here on, sending the prompt's rows takes more than three seconds.
                proxy.bytes_per_s = 1.1e6
                proxy.is_held = False
                # A request over the same link does not wait either: its rows are sent between those of the long prompt.
                for server in (quick, slow):
                    short = prompt_of(20, next(seeds))
                    assert complete_greedily(server, short, 5) == alone(short, 5)
                is_being_sent = num_receiving(decode) == 1
                proxy.bytes_per_s = None
                assert answer.result() == alone(prompt)
            wait_at_rest(slow, quick, decode)
            return is_being_sent and num_remote_tokens(slow) == NUM_TOKENS - 1 + 4 and num_remote_tokens(quick) == before + 4

        # A busy machine may be too late for a load's deadline.
        wait_until(others_are_answered_meanwhile, "others are answered while a long prompt is being sent")


@pytest.mark.night
def test_44_a_node_whose_free_pages_fall_is_asked_less_often():
    num_pages = 160
    small = ("--kv-cache-memory", num_pages * 16 * ROW_BYTES)
    with Fleet() as fleet:
        decode = [fleet.decode(*SLOW, *small) for _ in range(2)]
        prefill = fleet.prefill(*SLOW, num_decode_nodes=2)
        seeds = iter(range(1000))

        def shares(num_requests, num_free):
            """Returns how many of the requests each node was asked to take. The requests wait until the fuller node's
            number of free pages is in `num_free`."""
            wait_until(lambda: min(reported_free_pages(prefill)) in num_free, "free pages are reported")
            before = [num_asked(node) for node in decode]
            for _ in range(num_requests):
                # Too few rows to measure the link.
                complete_greedily(prefill, prompt_of(10, next(seeds)), 2)
            return [num_asked(node) - num for node, num in zip(decode, before)]

        # Points are drawn evenly, so that even a few requests are divided by weight.
        assert all(3 <= share <= 7 for share in shares(10, [num_pages]))
        full, free = decode
        with ask(full, prompt_of(1500), 500):
            wait_until(lambda: full.metric("corella_kv_pages_in_use") >= 94, "its pages are taken")
            # Otherwise a quick machine finishes the long request before the others are divided.
            with slowed(full):
                to_full, to_free = shares(16, range(67))
            assert full.metric("corella_kv_pages_in_use") >= 94, "they still are"
        # The full node has at most 66 free pages, and the other node 160: fewer than 0.3 of the requests go to the full
        # node. Taking turns would give it 8.
        assert 1 <= to_full <= 6
        assert to_full + to_free == 16
        wait_at_rest(*decode)
        assert all(3 <= share <= 7 for share in shares(10, [num_pages]))
        wait_at_rest(prefill, *decode)


def test_45_nodes_of_another_model_or_version_are_left_out_and_named_once(alone, golden_folder):
    with Fleet() as fleet:
        other_model = fleet.decode(golden_folder, "--node-id", "other-model")
        other_version, proxy = fleet.decode_behind_proxy(*SLOW, "--node-id", "other-version")
        proxy.rewrite = _with_next_protocol
        prefill = fleet.node("prefill", *SLOW)
        wait_until(lambda: num_decode_nodes(prefill, "incompatible") == 2, "both are left out")
        for seed in range(5):
            prompt = prompt_of(30, seed)
            assert complete_greedily(prefill, prompt, 5) == alone(prompt, 5)
        assert num_decode_nodes(prefill, "suspect") == 0
        assert num_remote_tokens(prefill) == 0
        for node in (other_model, other_version):
            assert num_steps(node) == 0
        for name in ("other-model", "other-version"):
            lines = [line for line in prefill.log().splitlines() if name in line and "WARN" in line]
            # The line appears once a minute, and not for each of the five requests.
            assert 1 <= len(lines) < 5, lines
        wait_at_rest(prefill, other_model, other_version)


def _with_next_protocol(chunk):
    """Makes a decode node report the next version in its greeting.

    Its instance's name, a field of 8 bytes and the version follow each other.
    """
    said = re.compile(rb"(other-version\x11.{8}\x18)(.)", re.DOTALL)
    return said.sub(lambda match: match[1] + bytes([match[2][0] + 1]), chunk)


def test_46_nodes_work_on_while_etcd_is_away_and_find_it_again(alone):
    with Etcd() as etcd, Fleet(f"etcd:{etcd.address}/corella") as fleet:
        decode = fleet.decode(*SLOW)
        prefill = fleet.prefill(*SLOW)
        etcd.kill()
        prompt = prompt_of(50)
        assert complete_greedily(prefill, prompt, NUM_TOKENS, complete_remotely) == alone(prompt)
        # etcd returns without any data.
        etcd.start()
        newcomer = fleet.prefill(*SLOW)
        assert complete_greedily(newcomer, prompt, NUM_TOKENS, complete_remotely) == alone(prompt)
        wait_for_decode_nodes(prefill, 1)
        wait_at_rest(prefill, newcomer, decode)


def test_46_a_node_that_is_restarted_at_its_address_is_another(alone):
    num_tokens = 200
    port = free_port()
    address = ("--node-id", "decode", "--cluster-listen", f"127.0.0.1:{port}")
    with Fleet() as fleet:
        first = fleet.decode(*SLOW, *address)
        prefill = fleet.prefill(*SLOW)
        prompt = prompt_of(50)
        chunks = stream(prefill, prompt, num_tokens)
        text = "".join(next(chunks).choices[0].text for _ in range(20))
        first.kill()
        second = fleet.decode(*SLOW, *address)
        wait_for_decode_nodes(prefill, 1)
        other = prompt_of(50, seed=2)
        assert complete_greedily(prefill, other, NUM_TOKENS, complete_remotely) == alone(other)
        assert num_steps(second) >= NUM_TOKENS - 1
        text += text_of(chunks)
        assert text == alone(prompt, num_tokens)
        wait_at_rest(prefill, second)
        (loss,) = [line for line in prefill.log().splitlines() if "does not answer" in line]
        assert "WARN" in loss and f"decode at 127.0.0.1:{port}" in loss and "decodes requests itself" in loss, loss
        assert prefill.log().count("node decode has joined") == 2


def test_47_full_decode_nodes_are_passed_over_until_none_has_room(alone):
    prompts = [prompt_of(100, seed) for seed in range(5)]
    num_tokens = 250
    # A page is 16 rows. One request fits, and two do not.
    small = ("--kv-cache-memory", 24 * 16 * ROW_BYTES, "--max-model-len", 360, "--head-room", "limit")
    with Fleet() as fleet:
        decode = [fleet.decode(*SLOW, *small) for _ in range(2)]
        one_at_a_time = ("--max-num-seqs", 1, "--max-queued-requests", 1)
        prefill = fleet.prefill(*SLOW, *one_at_a_time, num_decode_nodes=2)

        def num_busy():
            return sum(node.metric("corella_num_requests_running") for node in decode)

        streams, texts = [], []
        for prompt in prompts[:3]:
            streams.append(stream(prefill, prompt, num_tokens))
            texts.append(next(streams[-1]).choices[0].text)
            wait_until(lambda: num_busy() == min(len(streams), 2), "both decode nodes are full")
        wait_until(lambda: prefill.metric("corella_num_requests_running") == 1, "the third is decoded here")
        with in_background(complete_greedily, prefill, prompts[3], num_tokens) as waiting:
            wait_until(lambda: prefill.metric("corella_num_requests_waiting") == 1, "it waits")
            with pytest.raises(openai.RateLimitError) as refused:
                stream(prefill, prompts[4], num_tokens)
            assert int(refused.value.response.headers["retry-after"]) >= 1
            with concurrent.futures.ThreadPoolExecutor(len(streams)) as pool:
                rest = list(pool.map(text_of, streams))
            for prompt, text, more in zip(prompts, texts, rest):
                assert text + more == alone(prompt, num_tokens)
            assert waiting.result() == alone(prompts[3], num_tokens)
        wait_at_rest(prefill, *decode)


def test_47_a_burst_at_full_nodes_is_asked_to_come_again(alone):
    prompts = [prompt_of(100, seed) for seed in range(6)]
    num_tokens = 20
    with Fleet() as fleet:
        small = ("--kv-cache-memory", 9 * 16 * ROW_BYTES, "--max-model-len", 140, "--head-room", "limit")
        decode = fleet.decode(*SLOW, *small)
        prefill = fleet.prefill(*SLOW, "--max-num-seqs", 1, "--max-queued-requests", 1)

        refused = []

        def ask_until_there_is_room(prompt):
            def text_if_there_is_room():
                try:
                    return complete_greedily(prefill, prompt, num_tokens)
                except openai.RateLimitError as error:
                    refused.append(int(error.response.headers["retry-after"]))

            return wait_until(text_if_there_is_room, "there is room")

        with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
            # The burst comes at once.
            with prefill.held_with_requests(len(prompts)):
                answers = [pool.submit(ask_until_there_is_room, prompt) for prompt in prompts]
            for prompt, answer in zip(prompts, answers):
                assert answer.result() == alone(prompt, num_tokens)
        assert refused and min(refused) >= 1
        wait_at_rest(prefill, decode)


def test_49_a_decode_node_that_drains_says_so_and_finishes(alone):
    num_tokens = 300
    with Fleet() as fleet:
        leaving, staying = (fleet.decode(*SLOW) for _ in range(2))
        prefill = fleet.prefill(*SLOW, "--peer-policy", "round_robin", num_decode_nodes=2)
        prompts = [prompt_of(50, seed) for seed in range(4)]
        streams = [stream(prefill, prompt, num_tokens) for prompt in prompts]
        texts = [next(chunks).choices[0].text for chunks in streams]
        wait_until(lambda: num_asked(leaving) > 0, "both nodes take part")
        # Otherwise the leaving node finishes before the newcomer has started.
        with slowed(leaving):
            leaving.terminate()
            wait_until(lambda: leaving.status_of("/ready") != 200, "it is not ready")
            # The leaving node is listed while it has sessions, and gets no more of them.
            newcomer = fleet.prefill(*SLOW)
            wait_until(lambda: num_decode_nodes(newcomer, "draining") == 1, "the newcomer knows that it drains")
            assert num_decode_nodes(prefill, "healthy") == 1
            assert leaving.process.poll() is None
        with concurrent.futures.ThreadPoolExecutor(len(streams)) as pool:
            rest = list(pool.map(text_of, streams))
        for prompt, text, more in zip(prompts, texts, rest):
            assert text + more == alone(prompt, num_tokens)
        assert num_remote_tokens(prefill) == len(prompts) * (num_tokens - 1)
        assert leaving.wait() == 0
        wait_until(lambda: num_decode_nodes(newcomer, "draining") == 0, "it is on no list any more")
        wait_at_rest(prefill, staying)


def test_49_a_prefill_node_that_drains_sends_what_is_still_wanted(alone):
    prompt = prompt_of(900)
    with Fleet() as fleet:
        decode = fleet.decode(*SLOW)
        prefill, proxy = fleet.prefill_behind_proxy(*SLOW)
        proxy.is_held = True
        before = num_steps(decode)
        chunks = stream(prefill, prompt, NUM_TOKENS)
        text = next(chunks).choices[0].text
        assert prefill.metric("corella_kv_pages_held") > 0
        prefill.terminate()
        wait_until(lambda: prefill.status_of("/ready") != 200, "it is not ready")
        proxy.is_held = False
        text += text_of(chunks)
        assert text == alone(prompt)
        assert prefill.wait() == 0
        assert num_steps(decode) - before >= NUM_TOKENS - 1, "the decode node had all rows"
        wait_at_rest(decode)
