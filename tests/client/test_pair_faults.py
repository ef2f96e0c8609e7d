"""Causes faults of prefill and decode nodes, one test for each rule of behaviour from 38 to 49.

Clients must get what one process gives, and nodes that live must hold nothing afterwards. Rule 48, which takes longer,
is in `test_soak.py`.
"""

import concurrent.futures
import contextlib
import random
import re
import signal
import statistics
import time

import openai
import pytest
from fleet import (
    LOST_WITHIN_S,
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
    stream,
    text_of,
    wait_at_rest,
    wait_for_decode_nodes,
)
from server_process import ServerProcess, free_port, slowed

# A load may take a second and what its bytes need at 1 MB/s.
LOAD_BASE_S = 1.0
LEAST_BYTES_PER_S = 1e6
# Chunks of a prompt take tens of milliseconds each, so that a fault can hit it between two.
CHUNKS = ("--max-prefill-tokens", 64)
NUM_TOKENS = 60
# Decode nodes are asked once a second how they are.
REPORTED_WITHIN_S = 2.0


@pytest.fixture(scope="module")
def alone():
    """Returns the text that one process gives."""
    with ServerProcess(*SLOW) as server:
        yield lambda prompt, num_tokens=NUM_TOKENS: complete_greedily(server, prompt, num_tokens)


@contextlib.contextmanager
def in_background(act, *arguments, **options):
    """Yields the future of a call that runs meanwhile, and that may never return if the test fails."""
    pool = concurrent.futures.ThreadPoolExecutor(1)
    try:
        yield pool.submit(act, *arguments, **options)
    finally:
        pool.shutdown(wait=False)


def wait_until(condition, what, timeout_s=LOST_WITHIN_S):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"never happened: {what}"
        time.sleep(0.005)


def num_sent_bytes(prefill):
    return prefill.metric("corella_kv_sent_bytes_total")


def num_cached_pages(server):
    return server.metric("corella_kv_pages_cached")


def test_38_decode_node_killed_while_it_is_sent_a_prompt_is_replaced_by_another(alone):
    prompt = prompt_of(1200)
    with Fleet() as fleet:
        decode = [fleet.decode(*SLOW) for _ in range(2)]
        prefill = fleet.prefill(*SLOW, *CHUNKS, num_decode_nodes=2)
        with in_background(complete_greedily, prefill, prompt, NUM_TOKENS) as answer:
            wait_until(lambda: num_sent_bytes(prefill) > 0, "rows are on their way")
            (killed,) = [node for node in decode if num_receiving(node) == 1]
            (other,) = [node for node in decode if node is not killed]
            killed.process.kill()
            wait_until(lambda: num_receiving(other) == 1, "it is tried once more elsewhere")
            assert answer.result() == alone(prompt)
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
        decode.process.kill()
        killed_at = time.monotonic()
        text += text_of(chunks)
        assert time.monotonic() - killed_at < LOST_WITHIN_S
        assert text == alone(prompt)
        wait_at_rest(prefill)
        assert num_remote_tokens(prefill) == 0, "nothing of it was decoded there"


def test_38_decode_node_that_stops_is_given_up_and_lets_go_when_it_wakes(alone):
    prompt = prompt_of(100)
    num_tokens = 200
    with Fleet() as fleet:
        decode = fleet.decode(*SLOW)
        prefill = fleet.prefill(*SLOW)
        chunks = stream(prefill, prompt, num_tokens)
        text = "".join(next(chunks).choices[0].text for _ in range(20))
        decode.process.send_signal(signal.SIGSTOP)
        stopped_at = time.monotonic()
        text += text_of(chunks)
        assert time.monotonic() - stopped_at < LOST_WITHIN_S
        assert text == alone(prompt, num_tokens)
        assert num_decode_nodes(prefill, "suspect") == 1
        wait_at_rest(prefill)
        decode.process.send_signal(signal.SIGCONT)
        wait_at_rest(decode)
        wait_for_decode_nodes(prefill, 1)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_39_what_a_lost_prefill_node_has_sent_is_never_found(alone, how):
    prompt = prompt_of(600)
    with Fleet() as fleet:
        decode = fleet.decode(*SLOW)
        lost, proxy = fleet.prefill_behind_proxy(*SLOW, *CHUNKS)
        num_cached_before = num_cached_pages(decode)
        chunks = stream(lost, prompt, NUM_TOKENS)
        with in_background(lambda: list(chunks)) as answer:
            # Half of the rows come through.
            wait_until(lambda: proxy.num_bytes > 300 * ROW_BYTES, "rows are on their way")
            proxy.is_held = True
            assert num_receiving(decode) == 1
            lost.process.send_signal(how)
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
    prompts = [prompt_of(numbers.randrange(1, 60), seed) for seed in range(200)]
    with Fleet() as fleet:
        lone = fleet.enter_context(ServerProcess(*THREADS))
        decode = [fleet.decode(*THREADS) for _ in range(2)]
        prefill = fleet.prefill(*THREADS, num_decode_nodes=2)

        def ask_late(index, pause_s):
            time.sleep(pause_s)
            # The client's own id says nothing about what is whose.
            headers = {"x-request-id": f"client-{index}"}
            num_tokens = 1 + index % 16
            return complete_greedily(prefill, prompts[index], num_tokens, extra_headers=headers)

        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            pairs = [
                [pool.submit(ask_late, index, numbers.random() / 50) for _ in range(2)]
                for index in range(len(prompts))
            ]
            expected = [
                pool.submit(complete_greedily, lone, prompt, 1 + index % 16)
                for index, prompt in enumerate(prompts)
            ]
            for (one, other), lone_text in zip(pairs, expected):
                assert one.result() == other.result() == lone_text.result()
        wait_at_rest(prefill, *decode)
        assert num_remote_tokens(prefill) > 200


def test_41_kv_that_never_comes_is_not_waited_for(alone):
    prompt = prompt_of(500)
    with Fleet() as fleet:
        decode = fleet.decode(*SLOW)
        prefill, proxy = fleet.prefill_behind_proxy(*SLOW)
        num_cached_before = num_cached_pages(decode)
        proxy.is_held = True
        chunks = stream(prefill, prompt, NUM_TOKENS)
        text = next(chunks).choices[0].text
        first_at = time.monotonic()
        wait_until(lambda: num_receiving(decode) == 0, "the load is given up")
        waited_s = time.monotonic() - first_at
        deadline_s = LOAD_BASE_S + len(prompt) * ROW_BYTES / LEAST_BYTES_PER_S
        # It may be late by 50 ms, and five times as much on a busy machine. The client hears of the first
        # token a little later than the decode node.
        assert deadline_s - 0.25 < waited_s < deadline_s + 0.25
        text += text_of(chunks)
        assert text == alone(prompt)
        wait_at_rest(prefill, decode)
        assert num_cached_pages(decode) == num_cached_before
        # What was held back comes late, and is nobody's.
        proxy.is_held = False
        other = prompt_of(500, seed=2)
        assert complete_greedily(prefill, other, NUM_TOKENS, complete_remotely) == alone(other)
        wait_at_rest(prefill, decode)


def test_42_pending_loads_hold_up_nobody(alone):
    with Fleet() as fleet:
        decode = fleet.decode(*SLOW, "--transfer-threads", 1)
        busy, quick = (fleet.prefill(*SLOW) for _ in range(2))
        # The prompts are computed one after the other, so that most loads wait all the time.
        with contextlib.ExitStack() as stack:
            asked = [stack.enter_context(ask(busy, prompt_of(1900, seed), 9)) for seed in range(8)]
            wait_until(lambda: num_receiving(decode) == len(asked), "all loads wait")
            answered_s = []
            for _ in range(9):
                asked_at = time.monotonic()
                assert decode.status_of("/health") == 200
                answered_s.append(time.monotonic() - asked_at)
            prompt = prompt_of(20)
            assert complete_greedily(quick, prompt, 5, complete_remotely) == alone(prompt, 5)
            assert num_receiving(decode) >= 4, "four times as many loads wait as threads"
            left_s = []
            while asked:
                num_before = num_receiving(decode)
                asked.pop().close()
                left_at = time.monotonic()
                wait_until(lambda: num_receiving(decode) < num_before, "a load is over")
                left_s.append(time.monotonic() - left_at)
        # 50 ms, and five times as much on a busy machine.
        assert statistics.median(answered_s) < 0.25
        assert statistics.median(left_s) < 0.25
        wait_at_rest(busy, quick, decode)


def test_43_a_client_that_leaves_before_the_decode_node_answers_costs_it_no_step():
    with Fleet() as fleet:
        decode = fleet.decode(*SLOW)
        prefill = fleet.prefill(*SLOW)
        decode.process.send_signal(signal.SIGSTOP)
        with ask(prefill, prompt_of(1900), NUM_TOKENS):
            wait_until(lambda: prefill.metric("corella_sessions") == 1, "the request has come")
        wait_at_rest(prefill)
        decode.process.send_signal(signal.SIGCONT)
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
        num_steps_when_it_left = num_steps(prefill)
        wait_at_rest(prefill, decode)
        assert num_steps(prefill) - num_steps_when_it_left <= 5
        assert num_steps(prefill) < len(prompt) / 64
        assert num_steps(decode) == num_cached_pages(decode) == 0


def test_43_a_client_that_leaves_while_its_prompt_is_sent_frees_both_nodes():
    with Fleet() as fleet:
        decode = fleet.decode(*SLOW)
        prefill, proxy = fleet.prefill_behind_proxy(*SLOW)
        proxy.is_held = True
        before = num_steps(decode), num_cached_pages(decode)
        # The load alone would be waited for for more than six seconds.
        with ask(prefill, prompt_of(1900), NUM_TOKENS):
            wait_until(lambda: prefill.metric("corella_kv_pages_held") > 0, "it is computed")
            assert num_receiving(decode) == 1
        wait_at_rest(prefill, decode, timeout_s=5.0)
        assert (num_steps(decode), num_cached_pages(decode)) == before


def test_43_a_client_that_leaves_while_it_is_answered_frees_both_nodes():
    with Fleet() as fleet:
        decode = fleet.decode(*SLOW)
        prefill = fleet.prefill(*SLOW)
        with ask(prefill, prompt_of(1000), 1000):
            wait_until(lambda: num_steps(decode) >= 20, "it is being answered")
        num_steps_when_it_left = num_steps(decode)
        wait_at_rest(prefill, decode, timeout_s=5.0)
        # What it took to notice that the client has gone counts, too.
        assert num_steps(decode) - num_steps_when_it_left < 100


def test_44_a_slow_node_delays_nobody_else(alone):
    prompt = prompt_of(1200)
    with Fleet() as fleet:
        decode = fleet.decode(*SLOW)
        slow, proxy = fleet.prefill_behind_proxy(*SLOW)
        quick = fleet.prefill(*SLOW, "--transport", "tcp")
        proxy.is_held = True
        proxy.bytes_per_s = 1.1e6
        with in_background(complete_greedily, slow, prompt, NUM_TOKENS) as answer:
            wait_until(lambda: slow.metric("corella_kv_pages_held") > 0, "it is computed")
            proxy.is_held = False
            for seed in range(2):
                short = prompt_of(20, seed)
                assert complete_greedily(quick, short, 5, complete_remotely) == alone(short, 5)
            # Not even somebody behind the same link, whose rows go in between.
            assert complete_greedily(slow, prompt_of(20, 7), 5, complete_remotely) == alone(prompt_of(20, 7), 5)
            assert num_receiving(decode) == 1, "the long prompt is still being sent"
            assert answer.result() == alone(prompt)
        assert num_remote_tokens(slow) == NUM_TOKENS - 1 + 4
        wait_at_rest(slow, quick, decode)


def test_44_a_node_whose_free_pages_fall_is_asked_less_often():
    num_pages = 160
    small = ("--kv-cache-memory", num_pages * 16 * ROW_BYTES)
    with Fleet() as fleet:
        decode = [fleet.decode(*SLOW, *small) for _ in range(2)]
        prefill = fleet.prefill(*SLOW, num_decode_nodes=2)
        seeds = iter(range(1000))

        def shares(num_requests):
            """Returns how many of so many requests each node was asked to take."""
            time.sleep(REPORTED_WITHIN_S)
            before = [num_asked(node) for node in decode]
            for _ in range(num_requests):
                # So few rows are no measure of the link.
                complete_greedily(prefill, prompt_of(10, next(seeds)), 2)
            return [num_asked(node) - num for node, num in zip(decode, before)]

        # Points are drawn evenly, so that even a few requests are shared out by weight.
        assert all(7 <= share <= 13 for share in shares(20))
        full, free = decode
        with ask(full, prompt_of(1500), 500):
            wait_until(lambda: full.metric("corella_kv_pages_in_use") >= 94, "its pages are taken")
            # Or a quick machine is done with it before the requests are shared out.
            with slowed(full):
                to_full, to_free = shares(30)
            assert full.metric("corella_kv_pages_in_use") >= 94, "they still are"
        # It has 66 free pages and then fewer, the other one 160: it is asked for less than 0.3 of the requests.
        # Taking turns would be 15.
        assert 1 <= to_full <= 11
        assert to_full + to_free == 30
        wait_at_rest(*decode)
        assert all(7 <= share <= 13 for share in shares(20))
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
            assert len(lines) == 1, lines
        wait_at_rest(prefill, other_model, other_version)


def _with_next_protocol(chunk):
    """Makes a decode node say that it speaks version 3, where it says who it is.

    Its instance's name, a field of 8 bytes and the version follow each other.
    """
    said = re.compile(rb"(other-version\x11.{8}\x18)\x02", re.DOTALL)
    return said.sub(lambda match: match[1] + b"\x03", chunk)


def test_46_nodes_work_on_while_etcd_is_away_and_find_it_again(alone):
    with Etcd() as etcd, Fleet(f"etcd:{etcd.address}/corella") as fleet:
        decode = fleet.decode(*SLOW)
        prefill = fleet.prefill(*SLOW)
        etcd.kill()
        prompt = prompt_of(50)
        assert complete_greedily(prefill, prompt, NUM_TOKENS, complete_remotely) == alone(prompt)
        # It comes back without any data.
        etcd.start()
        newcomer = fleet.prefill(*SLOW)
        assert complete_greedily(newcomer, prompt, NUM_TOKENS, complete_remotely) == alone(prompt)
        wait_for_decode_nodes(prefill, 1)
        wait_at_rest(prefill, newcomer, decode)


def test_46_a_node_that_is_restarted_at_its_address_is_another(alone):
    num_tokens = 300
    address = ("--node-id", "decode", "--cluster-listen", f"127.0.0.1:{free_port()}")
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


def test_47_full_decode_nodes_are_passed_over_until_nobody_has_room(alone):
    prompts = [prompt_of(100, seed) for seed in range(5)]
    num_tokens = 400
    # A page is 16 rows. One request fits, and two do not.
    small = ("--kv-cache-memory", 33 * 16 * ROW_BYTES, "--max-model-len", 510, "--head-room", "limit")
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
        assert prefill.metric("corella_num_requests_running") == 1, "the third is decoded here"
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
    prompts = [prompt_of(100, seed) for seed in range(10)]
    num_tokens = 20
    with Fleet() as fleet:
        small = ("--kv-cache-memory", 9 * 16 * ROW_BYTES, "--max-model-len", 140, "--head-room", "limit")
        decode = fleet.decode(*SLOW, *small)
        prefill = fleet.prefill(*SLOW, "--max-num-seqs", 1, "--max-queued-requests", 1)

        def ask_until_there_is_room(prompt):
            num_refused = 0
            while True:
                try:
                    return complete_greedily(prefill, prompt, num_tokens), num_refused
                except openai.RateLimitError as error:
                    assert int(error.response.headers["retry-after"]) >= 1
                    num_refused += 1
                    time.sleep(0.05)

        with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
            answers = list(pool.map(ask_until_there_is_room, prompts))
        for prompt, (text, _) in zip(prompts, answers):
            assert text == alone(prompt, num_tokens)
        assert sum(num_refused for _, num_refused in answers) > 0
        wait_at_rest(prefill, decode)


def test_49_a_decode_node_that_drains_is_taken_off_the_list_and_finishes(alone):
    num_tokens = 150
    with Fleet() as fleet:
        leaving, staying = (fleet.decode(*SLOW) for _ in range(2))
        prefill = fleet.prefill(*SLOW, "--peer-policy", "round_robin", num_decode_nodes=2)
        prompts = [prompt_of(50, seed) for seed in range(4)]
        streams = [stream(prefill, prompt, num_tokens) for prompt in prompts]
        texts = [next(chunks).choices[0].text for chunks in streams]
        assert leaving.metric("corella_sessions") > 0
        leaving.terminate()
        wait_until(lambda: leaving.status_of("/ready") != 200, "it is not ready")
        # It is on no list any more, although it has not gone.
        newcomer = fleet.prefill(*SLOW)
        assert leaving.process.poll() is None
        assert num_decode_nodes(newcomer, "draining") == 0
        with concurrent.futures.ThreadPoolExecutor(len(streams)) as pool:
            rest = list(pool.map(text_of, streams))
        for prompt, text, more in zip(prompts, texts, rest):
            assert text + more == alone(prompt, num_tokens)
        assert num_remote_tokens(prefill) == len(prompts) * (num_tokens - 1)
        assert leaving.wait() == 0
        wait_at_rest(prefill, staying)


def test_49_a_prefill_node_that_drains_sends_what_is_still_wanted(alone):
    prompt = prompt_of(600)
    with Fleet() as fleet:
        decode = fleet.decode(*SLOW)
        prefill, proxy = fleet.prefill_behind_proxy(*SLOW)
        proxy.bytes_per_s = 1.5e6
        before = num_steps(decode)
        chunks = stream(prefill, prompt, NUM_TOKENS)
        text = next(chunks).choices[0].text
        assert prefill.metric("corella_kv_pages_held") > 0
        prefill.terminate()
        text += text_of(chunks)
        assert text == alone(prompt)
        assert prefill.wait() == 0
        assert num_steps(decode) - before >= NUM_TOKENS - 1, "the decode node had all rows"
        wait_at_rest(decode)
