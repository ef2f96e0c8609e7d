"""The classes of answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

TokenTexts = Callable[[list[int]], list[str]]


@dataclass(frozen=True)
class Logprob:
    """How likely a token was."""

    logprob: float
    decoded_token: str
    """The token's text, which may be a part of a character."""
    rank: int | None = None
    """The token's place among all tokens of the vocabulary: 1 is the most likely token."""


@dataclass
class CompletionOutput:
    """One answer."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    """All drawn tokens, including an end token and the tokens of a stop string, which the text lacks."""
    finish_reason: str | None = None
    """`"stop"`, `"length"` or `"tool_calls"`. `None` until the answer has ended."""
    stop_reason: int | str | None = None
    """The stop string or the stop token that ended the answer, if one did."""
    logprobs: list[dict[int, Logprob]] | None = None
    """Log-probabilities for each token of the answer, by token id: of the token and of the likeliest alternatives."""
    reasoning: str | None = None
    """The model's reasoning before its answer, in a chat."""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    """Calls of tools, as in OpenAI's API."""

    @property
    def cumulative_logprob(self) -> float | None:
        """The sum of the log-probabilities of the answer's tokens, if `logprobs` was set."""
        if self.logprobs is None:
            return None
        return sum(row[token].logprob for token, row in zip(self.token_ids, self.logprobs))


@dataclass(frozen=True)
class RequestMetrics:
    """When the answers to a prompt reached each stage, in seconds since 1970."""

    arrival_time: float
    queued_ts: float
    """When the prompt was tokenised and began to wait."""
    scheduled_ts: float
    """When the computation of the prompt began."""
    first_token_ts: float
    last_token_ts: float
    first_token_latency: float
    """The time from the arrival to the first token, in seconds."""
    num_generation_tokens: int
    """The number of tokens of all answers together."""

    def joined(self, other: RequestMetrics | None) -> RequestMetrics:
        """The metrics of two groups of answers to one prompt."""
        if other is None:
            return self
        return RequestMetrics(
            arrival_time=min(self.arrival_time, other.arrival_time),
            queued_ts=min(self.queued_ts, other.queued_ts),
            scheduled_ts=min(self.scheduled_ts, other.scheduled_ts),
            first_token_ts=min(self.first_token_ts, other.first_token_ts),
            last_token_ts=max(self.last_token_ts, other.last_token_ts),
            first_token_latency=min(self.first_token_latency, other.first_token_latency),
            num_generation_tokens=self.num_generation_tokens + other.num_generation_tokens,
        )


@dataclass
class RequestOutput:
    """The answers to one prompt."""

    request_id: str
    prompt: str | Any
    """The prompt if it was a text, and otherwise `None`."""
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0
    """The number of prompt tokens that were found in the prefix cache."""
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    metrics: RequestMetrics | None = field(default=None, compare=False)
    """When the answers were computed. `None` before the end of the first answer, and without a token."""

    @property
    def finished(self) -> bool:
        """Whether all answers have ended."""
        return all(output.finish_reason is not None for output in self.outputs)

    @property
    def text(self) -> str:
        """The text of the first answer."""
        return self.outputs[0].text


@dataclass(frozen=True)
class Delta:
    """A part of an answer, as it arrives in a stream."""

    text: str
    """May be empty in the middle of a character, or of a text that may become a stop string."""
    index: int = 0
    """The number of the answer, if there are several."""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    """Why the answer has ended, in its last delta."""
    stop_reason: int | str | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    reasoning: str | None = None
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    """Parts of tool calls, as in OpenAI's API. Parts with the same `index` belong to one call."""


def read_answer(answer: dict[str, Any], prompt: str | None, token_texts: TokenTexts) -> RequestOutput:
    """Reads an answer of `/v1/completions` or `/v1/chat/completions`."""
    first = answer["choices"][0]
    prompt_logprobs = answer.get("prompt_logprobs") or first.get("prompt_logprobs")
    output = RequestOutput(
        request_id=answer["id"],
        prompt=prompt,
        prompt_token_ids=answer.get("prompt_token_ids") or first.get("prompt_token_ids") or [],
        outputs=[_read_choice(choice, token_texts) for choice in answer["choices"]],
        num_cached_tokens=read_num_cached_tokens(answer["usage"]),
        prompt_logprobs=None if prompt_logprobs is None else [_read_scored(row) for row in prompt_logprobs],
    )
    for choice in answer["choices"]:
        add_metrics(output, choice)
    return output


def add_metrics(output: RequestOutput, choice: dict[str, Any]) -> None:
    """Adds the times of a choice, or of the last part of a choice, to the metrics."""
    if (metrics := choice.get("metrics")) is not None:
        output.metrics = RequestMetrics(**metrics).joined(output.metrics)


def read_delta(choice: dict[str, Any], token_texts: TokenTexts) -> Delta:
    """Reads a choice of a chunk of a stream."""
    message = choice.get("delta", choice)
    return Delta(
        text=message.get("content" if "delta" in choice else "text") or "",
        index=choice["index"],
        token_ids=choice.get("token_ids") or [],
        finish_reason=choice.get("finish_reason"),
        stop_reason=choice.get("stop_reason"),
        logprobs=_read_logprobs(choice.get("logprobs"), token_texts),
        reasoning=message.get("reasoning_content"),
        tool_calls=message.get("tool_calls") or [],
    )


def read_num_cached_tokens(usage: dict[str, Any]) -> int:
    """Returns the number of prompt tokens that were found in the prefix cache."""
    details: dict[str, int] = usage.get("prompt_tokens_details") or {}
    return details.get("cached_tokens", 0)


def add_delta(output: CompletionOutput, delta: Delta) -> None:
    """Appends a delta to its answer."""
    output.text += delta.text
    output.token_ids += delta.token_ids
    output.finish_reason = delta.finish_reason or output.finish_reason
    output.stop_reason = output.stop_reason if delta.stop_reason is None else delta.stop_reason
    if delta.logprobs is not None:
        output.logprobs = (output.logprobs or []) + delta.logprobs
    if delta.reasoning is not None:
        output.reasoning = (output.reasoning or "") + delta.reasoning
    for part in delta.tool_calls:
        if part["index"] == len(output.tool_calls):
            function = {"name": "", "arguments": "", **part["function"]}
            call = {key: value for key, value in part.items() if key != "index"}
            output.tool_calls.append({**call, "function": function})
        else:
            call = output.tool_calls[part["index"]]
            call["function"]["arguments"] += part["function"].get("arguments") or ""


def _read_choice(choice: dict[str, Any], token_texts: TokenTexts) -> CompletionOutput:
    message = choice.get("message", choice)
    return CompletionOutput(
        index=choice["index"],
        text=message.get("content" if "message" in choice else "text") or "",
        token_ids=choice.get("token_ids") or [],
        finish_reason=choice["finish_reason"],
        stop_reason=choice.get("stop_reason"),
        logprobs=_read_logprobs(choice.get("logprobs"), token_texts),
        reasoning=message.get("reasoning_content"),
        tool_calls=message.get("tool_calls") or [],
    )


def _read_logprobs(logprobs: dict[str, Any] | None, token_texts: TokenTexts) -> list[dict[int, Logprob]] | None:
    if logprobs is None:
        return None
    if "content" in logprobs:
        return [
            _read_row(
                _id(row["token"]),
                row["logprob"],
                row.get("rank"),
                [(_id(top["token"]), top["logprob"]) for top in row["top_logprobs"]],
                token_texts,
            )
            for row in logprobs["content"]
        ]
    tokens, own, tops = logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"]
    ranks = logprobs.get("ranks") or [None] * len(tokens)
    rows = []
    for token, logprob, rank, row in zip(tokens, own, ranks, tops):
        top = sorted(((_id(name), value) for name, value in row.items()), key=lambda pair: (-pair[1], pair[0]))
        rows.append(_read_row(_id(token), logprob, rank, top, token_texts))
    return rows


def _read_row(
    token: int, logprob: float, rank: int | None, top: list[tuple[int, float]], token_texts: TokenTexts
) -> dict[int, Logprob]:
    """Puts the drawn token first, and after it the other tokens of `top`, which begins with the likeliest token."""
    others = [pair for pair in top if pair[0] != token]
    texts = token_texts([token, *(other for other, _ in others)])
    row = {token: Logprob(logprob, texts[0], rank)}
    # The drawn token's rank is a place among the other tokens, or after all of them.
    places = (place for place in range(1, len(others) + 2) if place != rank)
    for (other, value), text, place in zip(others, texts[1:], places):
        row[other] = Logprob(value, text, None if rank is None else place)
    return row


def _id(name: str) -> int:
    """The id in `token_id:7`."""
    return int(name.removeprefix("token_id:"))


def _read_scored(row: dict[str, Any] | None) -> dict[int, Logprob] | None:
    if row is None:
        return None
    return {
        int(token): Logprob(scored["logprob"], scored["decoded_token"], scored["rank"])
        for token, scored in row.items()
    }
