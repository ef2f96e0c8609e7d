"""Answers as they are written."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from types import TracebackType
from typing import Any

from corella._corella import Job
from corella.errors import CorellaError, EngineError, RequestError
from corella.output import (
    CompletionOutput,
    Delta,
    RequestOutput,
    TokenTexts,
    add_delta,
    add_metrics,
    read_delta,
    read_num_cached_tokens,
)

Item = tuple[int, int, bytes]


class _Reader:
    """Turns the events of a stream into deltas."""

    def __init__(self, job: Job, prompt: str | None, token_texts: TokenTexts) -> None:
        self._job: Job | None = job
        self._token_texts = token_texts
        self._waiting: list[Delta] = []
        self._has_usage = False
        self.output = RequestOutput(request_id="", prompt=prompt, prompt_token_ids=[], outputs=[])
        """The answer so far. After the last delta, it is complete."""

    def _next_waiting(self) -> Delta | None:
        return self._waiting.pop(0) if self._waiting else None

    def _read(self, item: Item | None) -> None:
        """Reads an item of the job. `None` ends the job: no more deltas come."""
        if item is None:
            self._job = None
            if not self._has_usage:
                raise EngineError("the stream was cut off, because the LLM was closed or the answer cancelled")
            return
        chunk = read_item(item)
        self.output.request_id = chunk["id"]
        self.output.prompt_token_ids = chunk.get("prompt_token_ids") or self.output.prompt_token_ids
        for choice in chunk["choices"]:
            self.output.prompt_token_ids = choice.get("prompt_token_ids") or self.output.prompt_token_ids
            while len(self.output.outputs) <= choice["index"]:
                self.output.outputs.append(CompletionOutput(index=len(self.output.outputs)))
            delta = read_delta(choice, self._token_texts)
            add_delta(self.output.outputs[delta.index], delta)
            add_metrics(self.output, choice)
            if delta != Delta(text="", index=delta.index):
                self._waiting.append(delta)
        if not chunk["choices"] and chunk.get("usage"):
            self._has_usage = True
            self.output.num_cached_tokens = read_num_cached_tokens(chunk["usage"])

    def _cancel(self) -> None:
        if self._job is not None:
            self._job.cancel()
        self._job = None
        self._waiting.clear()


class Stream(_Reader, Iterator[Delta]):
    """The deltas of an answer as they arrive. Dropping the stream ends the request.

    >>> from corella import LLM, SamplingParams
    >>> with LLM(kv_cache_memory="64M") as llm:
    ...     stream = llm.stream("Once upon a time", SamplingParams(max_tokens=8, seed=1))
    ...     text = "".join(delta.text for delta in stream)
    >>> text == stream.output.text
    True
    """

    def __next__(self) -> Delta:
        while (delta := self._next_waiting()) is None:
            if self._job is None:
                raise StopIteration
            try:
                self._read(self._job.next())
            except BaseException:
                self._cancel()
                raise
        return delta

    def close(self) -> None:
        """Ends the request, if it still runs."""
        self._cancel()

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncStream(_Reader, AsyncIterator[Delta]):
    """The deltas of an answer as they arrive, for `async for`. Dropping the stream ends the request."""

    async def __anext__(self) -> Delta:
        while (delta := self._next_waiting()) is None:
            if self._job is None:
                raise StopAsyncIteration
            try:
                self._read(await next_item(self._job))
            except BaseException:
                self._cancel()
                raise
        return delta

    async def aclose(self) -> None:
        """Ends the request, if it still runs."""
        self._cancel()

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cancel()


async def next_item(job: Job) -> Item | None:
    """Waits for the next item of a job, without blocking the event loop."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Item | None] = loop.create_future()

    def resolve(item: Item | None) -> None:
        if not future.done():
            future.set_result(item)

    def deliver(item: Item | None) -> None:
        try:
            loop.call_soon_threadsafe(resolve, item)
        except RuntimeError:
            # The loop is closed, so no task waits for the item.
            pass

    job.deliver_next(deliver)
    while not future.done():
        # A notebook interrupts a cell by a callback, which does not wake the loop.
        await asyncio.wait([future], timeout=_WAKE_INTERVAL_S)
    return future.result()


_WAKE_INTERVAL_S = 0.25
"""The longest time that an event loop sleeps while it awaits an answer."""


def read_item(item: Item, num_requests: int = 1) -> dict[str, Any]:
    """Returns the JSON object of an item. Raises an item that is an error."""
    index, status, body = item
    if status == 0:
        raise EngineError(body.decode())
    if status == 200 and not body:
        return {}
    try:
        answer: dict[str, Any] = json.loads(body)
    except ValueError:
        message = "stream: must be false here; `stream` and `astream` read answers as they are written"
        raise RequestError(message, param="stream", index=index) from None
    # In some answers `error` is null.
    if (error := answer.get("error")) is not None:
        raise _error(error, status, index, f"prompt {index}: " if num_requests > 1 else "")
    return answer


def _error(error: dict[str, Any] | str, status: int, index: int, place: str) -> CorellaError:
    # In Ollama's API an error is a text, in the other APIs an object.
    fields: dict[str, Any] = {"message": error} if isinstance(error, str) else error
    message = place + fields["message"]
    # A stream may fail after its status, 200, was sent.
    if status == 200 and fields.get("type") == "invalid_request_error":
        status = 400
    if 400 <= status < 500:
        return RequestError(message, status=status, param=fields.get("param"), code=fields.get("code"), index=index)
    return EngineError(message)
