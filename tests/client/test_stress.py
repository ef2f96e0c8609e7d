"""Runs many streams at once in a pool that is too small for them, which must not change any token."""

import concurrent.futures
import functools
import random

import pytest
from server_process import ServerProcess

NUM_STREAMS = 64


def make_requests(seed):
    """Makes requests of which some share prefixes, some are greedy, and some have their own seeds.

    Answers are much longer than prompts, so that requests that start together outgrow the pool.
    """
    rng = random.Random(seed)
    beginnings = [[rng.randrange(3, 256) for _ in range(96)] for _ in range(4)]
    requests = []
    for i in range(NUM_STREAMS):
        shared = rng.choice(beginnings)[: rng.choice([0, 0, 0, rng.randrange(97), 96])]
        prompt = shared + [rng.randrange(3, 256) for _ in range(rng.randrange(1, 24))]
        request = {
            "prompt": prompt,
            "max_tokens": rng.randrange(1, 100) if rng.random() < 0.1 else rng.randrange(300, 370),
            "temperature": rng.choice([0, 0.8]),
            "seed": i,
            "extra_body": {"ignore_eos": True},
        }
        leaves_after = rng.randrange(0, 40) if rng.random() < 0.25 else None
        requests.append((request, leaves_after))
    return requests


def stream_text(server, model, request, leaves_after=None):
    """Returns the whole text, or None if the client left."""
    stream = server.client.completions.create(model=model, stream=True, **request)
    text, reasons = "", []
    for number, chunk in enumerate(stream):
        if number == leaves_after:
            stream.close()
            return None
        text += chunk.choices[0].text
        reasons.append(chunk.choices[0].finish_reason)
    assert reasons[-1] == "length"
    assert reasons[:-1] == [None] * (len(reasons) - 1)
    return text


@pytest.fixture(scope="module")
def alone(golden_folder):
    """Returns the answers that the requests of a seed get alone, with an empty cache."""
    arguments = ("--no-enable-prefix-caching", "--max-num-seqs", 1)
    with ServerProcess(golden_folder, *arguments) as server:
        model = server.model()

        @functools.cache
        def texts(seed):
            return [stream_text(server, model, request) for request, _ in make_requests(seed)]

        yield texts


FIFO, PACK = (), ("--prefill-admission-policy", "pack", "--max-prefill-tokens", 64)


@pytest.mark.parametrize(
    "seed, options",
    [
        pytest.param(1, FIFO, id="1-fifo"),
        pytest.param(1, PACK, id="1-pack"),
        pytest.param(2, FIFO, id="2-fifo", marks=pytest.mark.night),
        pytest.param(2, PACK, id="2-pack", marks=pytest.mark.night),
    ],
)
def test_equal_to_the_lone_run(golden_folder, alone, seed, options):
    requests = make_requests(seed)
    # A page is 16 tokens × K and V × 2 layers × 2 heads × 32 floats = 16 KiB, so there are 128 pages. No page is kept
    # free for outputs, so that requests outgrow the pool even if lengths are guessed well.
    arguments = ("--kv-cache-dtype", "f32", "--kv-cache-memory", "2M", "--head-room", 0, *options)
    with ServerProcess(golden_folder, *arguments) as server:
        model = server.model()
        in_use_at_start = server.metric("corella_kv_cache_usage_perc")
        with concurrent.futures.ThreadPoolExecutor(NUM_STREAMS) as pool:
            # All requests are sent before the first answer is read, because a later one would find the pool less
            # crowded.
            with server.held_with_requests(NUM_STREAMS):
                streams = [
                    pool.submit(stream_text, server, model, request, leaves_after)
                    for request, leaves_after in requests
                ]
            texts = [stream.result() for stream in streams]

        finished = [text is not None for text in texts]
        assert sum(finished) >= NUM_STREAMS // 2
        assert not all(finished), "nobody left early"
        expected = alone(seed)
        differing = [i for i, text in enumerate(texts) if text is not None and text != expected[i]]
        assert differing == []

        # A preempted request holds no page, and the server learns later that its client has left.
        server.wait_until(
            lambda: server.metric("corella_kv_cache_usage_perc") == in_use_at_start
            and server.metric("corella_num_requests_running") == 0
            and server.metric("corella_num_requests_waiting") == 0,
            "all pages are back, and all requests have ended",
        )
        num_preemptions = server.metric("corella_num_preemptions_total")
        num_evictions = server.metric("corella_kv_pages_evicted_total")
        print(f"{num_preemptions:.0f} preemptions, {num_evictions:.0f} pages evicted")
        assert num_preemptions > 0
        assert num_evictions > 0
        assert server.status_of("/ready") == 200
