"""How answers are drawn, and which log-probabilities are returned."""

from __future__ import annotations

import copy
import difflib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, fields
from typing import Any, Literal, TypedDict


class StructuredOutputsParams(TypedDict, total=False):
    """The form that an answer must have, by one of these fields.

    >>> StructuredOutputsParams(choice=["yes", "no"])
    {'choice': ['yes', 'no']}
    """

    json: str | Mapping[str, Any] | type[Any]
    """JSON that follows this schema. The schema is a text, a dict or a Pydantic class."""
    json_object: bool
    """Any JSON object."""
    regex: str
    """A text that the regular expression matches as a whole."""
    choice: Sequence[str]
    """One of these texts."""
    grammar: str
    """A text that this grammar, in Lark's notation, allows."""
    disable_any_whitespace: bool
    """With `json` or `json_object`: no space or line break stands between the parts of the JSON."""


_OF_VLLM = {
    "guided_decoding": "use structured_outputs",
    "logits_processors": "logit_bias, bad_words, allowed_token_ids and structured_outputs change what is drawn",
    "extra_args": "leave it out",
    "spaces_between_special_tokens": "leave it out: texts join tokens without spaces",
    "output_kind": "`generate` gives whole answers, and `stream` gives parts",
    "truncate_prompt_tokens": "cut the prompt with `get_tokenizer()`",
}


@dataclass(slots=True)
class SamplingParams:
    """How answers are drawn. The names are those of vLLM and of the server's API.

    A field that is `None` has the default of the API. Most defaults are the model's own. `max_tokens` is 16 for
    `generate`, and as many as fit for `chat`. The same prompt with the same `seed` has the same answer.

    >>> SamplingParams(temperature=0.7, top_p=0.9, seed=1, max_tokens=64, stop=["\\n\\n"])
    SamplingParams(seed=1, max_tokens=64, temperature=0.7, top_p=0.9, stop=['\\n\\n'])
    """

    n: int | None = None
    """The number of answers to each prompt."""
    best_of: int | None = None
    """Generates this many answers and returns the `n` most likely ones."""
    seed: int | None = None
    """The same seed draws the same answer. Without it, answers differ, and `LLM(seed=...)` makes a run repeatable."""
    max_tokens: int | None = None
    """The limit of tokens for each answer."""
    min_tokens: int | None = None
    """No end token or stop string ends an answer before it has this many tokens."""
    temperature: float | None = None
    """0 always takes the most likely token."""
    top_p: float | None = None
    """Above 0, up to 1: draws from the most likely tokens that together have this probability."""
    top_k: int | None = None
    """Draws from this many most likely tokens; 0 and -1 draw from all."""
    min_p: float | None = None
    """0 to 1: draws from tokens that are at least this many times as likely as the most likely one."""
    presence_penalty: float | None = None
    """-2 to 2: subtracted from the logit of each token that is already in the answer."""
    frequency_penalty: float | None = None
    """-2 to 2: subtracted from a token's logit once for each time that the token is already in the answer."""
    repetition_penalty: float | None = None
    """Above 0. A value above 1 makes tokens that are already in the prompt or the answer less likely."""
    stop: str | Sequence[str] | None = None
    """The first of these texts to appear ends an answer, and is not part of it."""
    stop_token_ids: Sequence[int] | None = None
    """Any of these tokens ends an answer."""
    include_stop_str_in_output: bool | None = None
    """Whether the stop string stays in the text."""
    ignore_eos: bool | None = None
    """Continues after the model's end token."""
    bad_words: Sequence[str] | None = None
    """Texts that do not appear in an answer."""
    logit_bias: Mapping[int, float] | None = None
    """Numbers from -100 to 100 that are added to the logits of tokens, by token id."""
    allowed_token_ids: Sequence[int] | None = None
    """The only tokens that may be drawn."""
    logprobs: int | None = None
    """Returns the log-probability of each token of the answer, and of this many alternatives."""
    prompt_logprobs: int | None = None
    """Returns the log-probability of each token of the prompt, and of this many alternatives."""
    skip_special_tokens: bool | None = None
    """Whether special tokens are left out of the text, as they are by default."""
    structured_outputs: Mapping[str, Any] | type[Any] | None = None
    """The form that the answer must have: `StructuredOutputsParams`, a dict with its fields, or a Pydantic class."""
    priority: int | None = None
    """With `scheduling_policy="priority"`, a request with a smaller number is more urgent."""
    cache_salt: str | None = None
    """Only prompts with the same salt share cached keys and values."""
    ttft_slo_ms: int | None = None
    """The objective for the time to the first token, in milliseconds. Needs `slo_admission`."""
    tpot_slo_ms: int | None = None
    """The objective for the time per further token, in milliseconds. Needs `slo_admission`."""

    detokenize: InitVar[Literal[True] | None] = None
    """vLLM's default, `True`, has no effect: answers have their text and their token ids."""

    def __post_init__(self, detokenize: Literal[True] | None) -> None:
        if detokenize not in (None, True):
            raise TypeError(f"SamplingParams has no detokenize={detokenize!r}: answers always have their text")

    def __new__(cls, *_: object, **names: object) -> SamplingParams:
        for name in names.keys() - cls.__dataclass_fields__.keys():
            near = difflib.get_close_matches(name, cls.__dataclass_fields__, 1)
            meant = f"did you mean {near[0]}?" if near else "fields of the API are keywords of `generate`"
            meant = _OF_VLLM.get(name, meant)
            raise TypeError(f"SamplingParams has no {name}; {meant}")
        return object.__new__(cls)

    def __repr__(self) -> str:
        set_fields = ((field.name, getattr(self, field.name)) for field in fields(self))
        shown = (f"{name}={value!r}" for name, value in set_fields if value is not None)
        return f"SamplingParams({', '.join(shown)})"

    def clone(self) -> SamplingParams:
        """Returns a copy that shares nothing with the original: a change of one does not change the other.

        >>> params = SamplingParams(temperature=0.7, stop=["a"])
        >>> other = params.clone()
        >>> other.temperature = 0
        >>> params
        SamplingParams(temperature=0.7, stop=['a'])
        """
        return copy.deepcopy(self)

    def to_fields(self) -> dict[str, Any]:
        """Returns the fields for a request of the API."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        if self.logit_bias is not None:
            given["logit_bias"] = {str(token): bias for token, bias in self.logit_bias.items()}
        return {name: value for name, value in given.items() if value is not None}


# Without it, notebooks would show and complete the arguments of `__new__`.
_FIELDS = list(inspect.signature(SamplingParams.__init__).parameters.values())[1:]
SamplingParams.__signature__ = inspect.Signature(_FIELDS)  # type: ignore[attr-defined]
