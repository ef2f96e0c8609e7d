"""How answers are drawn, and what is told about them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class SamplingParams:
    """How answers are drawn. The names are those of vLLM and of the server's API.

    A field that is `None` has the default of the API: most are the model's own, `max_tokens` is 16 for
    `generate` and what fits for `chat`. The same prompt with the same `seed` has the same answer.

    >>> SamplingParams(temperature=0.7, top_p=0.9, seed=1, max_tokens=64, stop=["\\n\\n"])
    SamplingParams(seed=1, max_tokens=64, temperature=0.7, top_p=0.9, stop=['\\n\\n'])
    """

    n: int | None = None
    """The number of answers to each prompt."""
    best_of: int | None = None
    """Generates this many answers and returns the `n` most likely ones."""
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    """0 takes the most likely token each time."""
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    bad_words: Sequence[str] | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    logprobs: int | None = None
    """Tells the log-probability of each token of the answer, and of this many alternatives."""
    prompt_logprobs: int | None = None
    """The same of each token of the prompt."""
    skip_special_tokens: bool | None = None
    structured_outputs: Mapping[str, Any] | None = None
    """What the answer must look like: `{"json": SCHEMA}`, `{"regex": ...}`, `{"choice": [...]}` and so on."""
    priority: int | None = None
    """Smaller is more urgent, with `scheduling_policy="priority"`."""
    cache_salt: str | None = None
    """Only prompts with the same salt share cached keys and values."""
    ttft_slo_ms: int | None = None
    tpot_slo_ms: int | None = None

    def __repr__(self) -> str:
        set_fields = ((field.name, getattr(self, field.name)) for field in fields(self))
        shown = (f"{name}={value!r}" for name, value in set_fields if value is not None)
        return f"SamplingParams({', '.join(shown)})"

    def to_fields(self) -> dict[str, Any]:
        """The fields of a request of the API."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        if self.logit_bias is not None:
            given["logit_bias"] = {str(token): bias for token, bias in self.logit_bias.items()}
        return {name: value for name, value in given.items() if value is not None}
