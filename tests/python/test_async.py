"""The asynchronous twins answer the same, never block the event loop, and let go when they are cancelled."""

import asyncio
import selectors

import pytest
from corella import LLM, EngineError, RequestError, SamplingParams
from corella.stream import next_item
from patience import PATIENCE_S, wait_until, wait_until_async

QUESTION = [{"role": "user", "content": "Tell me a story about a fox."}]
PARAMS = SamplingParams(max_tokens=30, seed=3)
ENDLESS = SamplingParams(max_tokens=1900, seed=1, ignore_eos=True)


def test_answers_are_the_same(llm):
    async def ask():
        generated, chatted = await asyncio.gather(
            llm.agenerate(["Once upon a time", "The owl"], PARAMS), llm.achat(QUESTION, PARAMS)
        )
        stream = llm.astream(QUESTION, PARAMS)
        text = "".join([delta.text async for delta in stream])
        return generated, chatted, text, stream.output

    generated, chatted, text, streamed = asyncio.run(ask())
    for own, other in zip(generated, llm.generate(["Once upon a time", "The owl"], PARAMS)):
        assert own.outputs == other.outputs
    assert chatted[0].outputs == llm.chat(QUESTION, PARAMS)[0].outputs == streamed.outputs
    assert text == chatted[0].text


def test_many_streams_at_once(llm):
    async def read(number):
        params = SamplingParams(max_tokens=20, seed=number)
        return "".join([delta.text async for delta in llm.astream("Once upon a time", params)])

    async def read_all():
        return await asyncio.gather(*map(read, range(64)))

    params = [SamplingParams(max_tokens=20, seed=number) for number in range(64)]
    expected = llm.generate(["Once upon a time"] * 64, params)
    assert asyncio.run(read_all()) == [output.text for output in expected]


def test_the_loop_turns_meanwhile(llm):
    async def count():
        params = SamplingParams(max_tokens=400, seed=1, ignore_eos=True)
        answer = asyncio.ensure_future(llm.agenerate("Once", params))
        num_turns = 0
        while not answer.done():
            await asyncio.sleep(0)
            num_turns += llm.num_live_requests
        assert len((await answer)[0].outputs[0].token_ids) == 400
        return num_turns

    assert asyncio.run(count()) > 10


def test_cancelling_ends_the_requests(llm):
    async def cancel_task(start):
        task = asyncio.ensure_future(start())
        await wait_until_async(lambda: llm.num_live_requests > 0, "the requests run")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    async def read_stream():
        async for _ in llm.astream("Once", ENDLESS):
            pass

    async def leave_stream():
        async with llm.astream("Once", ENDLESS) as stream:
            await anext(stream)

    async def time_out():
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(llm.agenerate(["Once"] * 4, ENDLESS), 0.05)

    for scenario in (
        cancel_task(lambda: llm.agenerate(["Once", "Twice"], ENDLESS)),
        cancel_task(read_stream),
        leave_stream(),
        time_out(),
    ):
        asyncio.run(scenario)
        wait_until(lambda: llm.num_live_requests == 0, "the requests end")


def test_errors_reach_the_awaiting_task(llm):
    async def ask():
        with pytest.raises(RequestError, match="temperature"):
            await llm.agenerate("Once", SamplingParams(temperature=-1))
        with pytest.raises(RequestError, match="temperature"):
            async for _ in llm.astream("Once", SamplingParams(temperature=-1)):
                pass

    asyncio.run(ask())


class SilentJob:
    """A job that never delivers an item."""

    def deliver_next(self, callback):
        pass


class InterruptedSelector(selectors.DefaultSelector):
    """Calls `interrupt` when the loop goes to sleep, where signals are handled."""

    interrupt = None

    def select(self, timeout=None):
        interrupt, self.interrupt = self.interrupt, None
        if interrupt:
            interrupt()
        return super().select(timeout)


def test_a_notebook_interrupts_a_cell_that_awaits():
    late = []
    selector = InterruptedSelector()

    async def wait():
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        loop.call_later(PATIENCE_S, late.append, "the loop slept")
        # A notebook cancels the cell by a callback, which does not wake the loop.
        selector.interrupt = lambda: loop.call_soon(task.cancel)
        await next_item(SilentJob())

    with pytest.raises(asyncio.CancelledError), asyncio.Runner(
        loop_factory=lambda: asyncio.SelectorEventLoop(selector)
    ) as runner:
        runner.run(wait())
    assert not late


def test_closing_wakes_who_awaits():
    async def ask():
        llm = LLM(kv_cache_memory="64M")
        task = asyncio.ensure_future(llm.agenerate("Once", ENDLESS))
        await wait_until_async(lambda: llm.num_live_requests > 0, "the requests run")
        llm.close()
        with pytest.raises(EngineError):
            await task

    asyncio.run(ask())
