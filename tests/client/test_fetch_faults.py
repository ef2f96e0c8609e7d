"""Causes faults of nodes that load each other's cached blocks. Clients get one process's answers, and living nodes hold
nothing afterwards.

A fault happens while a proxy holds the next frame of a load back, so that its phase is known.
"""

import concurrent.futures
import contextlib
import itertools

import pytest
from fleet import ROW_BYTES, ask
from frame_proxy import BLOCKS, CONFIRMED, FOUND, HOLD_ENDED, LANDED, ROWS, ROWS_END, FrameProxy
from patience import wait_until
from server_process import ServerProcess, free_port
from tcp_proxy import TcpProxy
from test_fetch import FETCH, NODE, THREADS, answer, num_loads, site_of

TCP = ("--transport", "tcp")
GREEDY = {"max_tokens": 8, "temperature": 0}
# Faults of one kind in a row.
NUM_FAULTS = 6
HOLDINGS = (
    "corella_kv_pages_in_use",
    "corella_kv_pages_held",
    "corella_num_requests_running",
    "corella_num_requests_waiting",
)


def prompt_of(num_tokens, seed=0):
    return [400 + seed + at % 97 for at in range(num_tokens)]


def wait_at_rest(*nodes):
    for node in nodes:
        node.wait_until(lambda: sum(node.metric(name) for name in HOLDINGS) == 0, "it holds nothing")


def num_answers(node, outcome):
    return node.metric("corella_block_answers_total", outcome=outcome)


def num_failures(node):
    """Returns a count of at least one for each failed fetch: of the fetch, of its load, or of both."""
    return node.metric("corella_block_fetches_total", outcome="failed") + num_loads(node, "failed")


@contextlib.contextmanager
def pair(proxy_before=TcpProxy):
    """Starts two nodes, and a proxy before the first."""
    with contextlib.ExitStack() as stack:
        first, second = (stack.enter_context(ServerProcess(*NODE, *FETCH, *TCP)) for _ in range(2))
        port = free_port()
        target = ("127.0.0.1", site_of(first)["port"])
        proxy = stack.enter_context(proxy_before(("127.0.0.1", port), target))
        yield first, second, proxy, {"host": "127.0.0.1", "port": port}


@contextlib.contextmanager
def in_phase(phase, first, second, proxy, site):
    """Yields a prompt, the lone run's answer to it, and the future of another answer, whose load is in a phase.

    On a busy machine, a load may end before it is in the phase. Then the next prompt is tried.
    """
    for seed in itertools.count(10):
        prompt = prompt_of(1200, seed)
        expected, _ = answer(first, prompt, **GREEDY)
        reached = phase(first, proxy)
        pool = concurrent.futures.ThreadPoolExecutor(1)
        try:
            answered = pool.submit(answer, second, prompt, site, **GREEDY)
            wait_until(lambda: reached() or answered.done(), "the load is in this phase")
            if reached():
                yield prompt, expected, answered
                return
            assert answered.result()[0] == expected
        finally:
            proxy.is_held = False
            pool.shutdown(wait=False)


def is_on_its_way(first, proxy):
    proxy.hold_after(100 * ROW_BYTES)
    return lambda: proxy.is_held


def is_slow(first, proxy):
    """A megabyte a second, for rows of 3.7 MB."""
    proxy.bytes_per_s = 1e6
    end = proxy.num_bytes + 10 * ROW_BYTES
    return lambda: proxy.num_bytes > end


# A load's next frame, and the number of its kind so far.
PHASES = {
    "looked-up": (BLOCKS, FOUND),
    "held": (ROWS,),
    "rows-on-their-way": (ROWS, None, 2),
    "sent": (ROWS_END,),
    "landed": (BLOCKS, CONFIRMED),
}
in_each_phase = pytest.mark.parametrize("phase", PHASES)


def reach(phase):
    """Brings a load into a phase."""

    def begin(_, proxy):
        proxy.hold_before(*PHASES[phase])
        return lambda: proxy.is_held

    return begin


def load(first, second, site, seeds):
    """Makes the second node load the first's blocks, and returns the prompt. On a busy machine, some loads may be too
    late."""

    def is_loaded():
        prompt = prompt_of(300, next(seeds))
        expected, _ = answer(first, prompt, **GREEDY)
        tokens, num_cached = answer(second, prompt, site, **GREEDY)
        assert tokens == expected
        assert num_cached in (0, 288)
        return prompt if num_cached else None

    return second.wait_until(is_loaded, "blocks are loaded")


@in_each_phase
def test_52_a_source_that_is_killed_costs_a_prompt(phase):
    with pair(FrameProxy) as (first, second, proxy, site):
        known = load(first, second, site, itertools.count())
        with in_phase(reach(phase), first, second, proxy, site) as (prompt, expected, answered):
            before = num_failures(second)
            first.kill()
            proxy.cut()
            assert answered.result()[0] == expected
        # The load may have failed before the cut, by its deadline.
        second.wait_until(lambda: num_failures(second) >= max(before, 1), "the load has failed")
        wait_at_rest(second)
        # Published blocks stay.
        assert answer(second, known, **GREEDY)[1] >= 288
        assert answer(second, prompt, **GREEDY)[0] == expected


@in_each_phase
def test_52_a_loader_that_is_killed_leaves_nothing_with_the_source(phase):
    with pair(FrameProxy) as (first, second, proxy, site):
        load(first, second, site, itertools.count())
        with in_phase(reach(phase), first, second, proxy, site) as (_, _, answered):
            second.kill()
            wait_at_rest(first)
            assert answered.exception() is not None, "its client is told"
        with ServerProcess(*NODE, *FETCH, *TCP) as third:
            load(first, third, site_of(first), itertools.count())
            wait_at_rest(first, third)


def test_52_a_node_that_is_restarted_at_its_address_has_nothing_of_before():
    address = ("--cluster-listen", f"127.0.0.1:{free_port()}", *THREADS, *FETCH, *TCP)
    seeds = itertools.count()
    with ServerProcess(*NODE, *FETCH, *TCP) as second:
        with ServerProcess(*address) as first:
            site = site_of(first)
            load(first, second, site, seeds)
            unused = prompt_of(300, next(seeds))
            expected, _ = answer(first, unused, **GREEDY)
            first.kill()
        num_blocks = second.metric("corella_fetched_blocks_total")
        with ServerProcess(*address) as first:
            assert site_of(first)["port"] == site["port"]
            assert answer(second, unused, site, **GREEDY) == (expected, 0)
            assert second.metric("corella_fetched_blocks_total") == num_blocks
            # The restarted node lends the blocks that it has computed itself.
            load(first, second, site, seeds)
            wait_at_rest(first, second)


def test_51_a_link_of_a_megabyte_a_second_delays_a_request_to_its_soft_deadline():
    with pair() as (first, second, proxy, site):
        with in_phase(is_slow, first, second, proxy, site) as (prompt, expected, answered):
            # Other loads use another link.
            load(first, second, site_of(first), itertools.count())
            assert answered.result()[0] == expected
        proxy.bytes_per_s = None
        wait_at_rest(first, second)
        assert answer(second, prompt, **GREEDY)[0] == expected


def test_51_a_client_that_leaves_while_blocks_land_frees_both_nodes():
    with pair() as (first, second, proxy, site):
        with in_phase(is_on_its_way, first, second, proxy, site) as (prompt, expected, answered):
            with ask(second, prompt, 500):
                second.wait_until(lambda: num_live(second) >= 2 or answered.done(), "another client waits, too")
            proxy.is_held = False
            assert answered.result()[0] == expected
        wait_at_rest(first, second)


def num_live(server):
    return sum(server.metric(f"corella_num_requests_{state}") for state in ("running", "waiting"))


def changed(at, new, kind, verb=None):
    """Writes other bytes into a frame of a kind."""

    def change(frame):
        if frame[0] != kind or verb not in (None, frame[36]):
            return None
        return frame[:at] + new + frame[at + len(new) :]

    return change


# Wrong answers of a source.
LIES = {
    "the key of another node's load": changed(12, bytes(8), BLOCKS, FOUND),
    "the key of another source": changed(20, bytes(8), BLOCKS, FOUND),
    "a request in place of an answer": changed(36, bytes([LANDED]), BLOCKS, FOUND),
    "a list longer than any": changed(32, b"\xff" * 4, BLOCKS, FOUND),
    "no frame": changed(0, b"\xff", BLOCKS, FOUND),
    "rows of a layer that the model has not": changed(12, b"\x63", ROWS),
    "rows of blocks that were not asked for": changed(17, b"\x7f", ROWS),
    "the end of rows that have not all come": changed(0, bytes([ROWS_END]), ROWS),
    "the end of the hold, when all bytes have come": changed(36, bytes([HOLD_ENDED]), BLOCKS, CONFIRMED),
}


def test_53_a_source_that_says_what_does_not_fit_costs_a_prompt_and_no_token():
    seeds = itertools.count()
    with pair(FrameProxy) as (first, second, proxy, site):

        def has_lied():
            prompt = prompt_of(300, next(seeds))
            expected, _ = answer(first, prompt, **GREEDY)
            assert answer(second, prompt, site, **GREEDY) == (expected, 0)
            return proxy.change is None

        for lie, proxy.change in LIES.items():
            second.wait_until(has_lied, f"the source says {lie}")
        second.wait_until(lambda: num_failures(second) >= len(LIES), "each lie has failed a fetch")
        assert second.metric("corella_fetched_blocks_total") == 0
        load(first, second, site, seeds)
        wait_at_rest(first, second)


def test_52_an_answer_behind_its_deadline_is_dropped():
    prompt = prompt_of(300)
    with pair(FrameProxy) as (first, second, proxy, site):
        expected, _ = answer(first, prompt, **GREEDY)
        proxy.hold_before(BLOCKS, FOUND)
        assert answer(second, prompt, site, **GREEDY) == (expected, 0)
        wait_until(lambda: proxy.is_held, "the answer is late")
        proxy.is_held = False
        # The answer to another question comes after it.
        answer(second, prompt_of(300, seed=1), site, **GREEDY)
        assert second.metric("corella_fetched_blocks_total") == 0
        load(first, second, site, itertools.count(2))
        wait_at_rest(first, second)


def with_other_bytes(chunk):
    """Changes rows, and not messages, which are shorter."""
    return chunk if len(chunk) < 4096 else chunk[:2000] + bytes([chunk[2000] ^ 4]) + chunk[2001:]


def test_52_damaged_rows_cost_prompts_and_a_line_a_minute():
    with pair() as (first, second, proxy, site):
        proxy.rewrite = with_other_bytes
        seeds = itertools.count()

        def are_told_of():
            for _ in range(NUM_FAULTS):
                prompt = prompt_of(300, next(seeds))
                expected, _ = answer(first, prompt, **GREEDY)
                assert answer(second, prompt, site, **GREEDY) == (expected, 0)
            return "closed the KV connection" in second.log()

        second.wait_until(are_told_of, "a damaged row has come")
        wait_at_rest(first, second)
        assert num_failures(second) >= next(seeds)
        assert second.metric("corella_fetched_blocks_total") == 0
        assert num_lines(second, "closed the KV connection") < NUM_FAULTS


def test_52_a_node_of_another_model_is_asked_for_nothing_and_named_once(golden_folder):
    with ServerProcess(golden_folder, *NODE, *FETCH) as other, ServerProcess(*NODE, *FETCH) as second:
        site = site_of(other)
        seeds = itertools.count()

        def is_told_of():
            for _ in range(NUM_FAULTS):
                assert answer(second, prompt_of(100, next(seeds)), site, **GREEDY)[1] == 0
            return "no cached blocks come from" in second.log()

        second.wait_until(is_told_of, "it is named")
        assert num_failures(second) >= next(seeds)
        assert num_answers(other, "found") == 0
        assert num_lines(second, "no cached blocks come from") < NUM_FAULTS
        wait_at_rest(second)


def num_lines(server, text):
    """Returns the number of the log's lines with a text. Such lines are logged once a minute, not each time."""
    return sum(text in line for line in server.log().splitlines())
