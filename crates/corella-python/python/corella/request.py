"""Requests of the API, from what methods of `LLM` are given."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any, Union

from corella.errors import RequestError
from corella.sampling_params import SamplingParams

Prompt = Union[str, Sequence[int], Mapping[str, Any]]
"""A text, token ids, or `{"prompt": TEXT}` or `{"prompt_token_ids": IDS}`."""
Message = Mapping[str, Any]
"""A message of a conversation, such as `{"role": "user", "content": TEXT}`."""
Params = Union[SamplingParams, Sequence[SamplingParams], None]

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


def completion_requests(
    prompts: Prompt | Sequence[Prompt], sampling_params: Params, fields: Mapping[str, Any]
) -> list[tuple[str, str | None]]:
    """The bodies of requests, and their prompts where they are texts."""
    listed = prompt_list(prompts)
    params = _params_of_each(sampling_params, len(listed))
    requests = []
    for prompt, own in zip(listed, params):
        content = content_of(prompt)
        body = {**_sampled(own), **_given(fields), "prompt": content}
        requests.append((to_json(body), content if isinstance(content, str) else None))
    return requests


def chat_requests(
    messages: Sequence[Message] | Sequence[Sequence[Message]],
    sampling_params: Params,
    tools: Sequence[Mapping[str, Any]] | None,
    chat_template_kwargs: Mapping[str, Any] | None,
    fields: Mapping[str, Any],
) -> list[tuple[str, str | None]]:
    if isinstance(messages, str):
        raise TypeError("a conversation is a list of messages, such as [{'role': 'user', 'content': TEXT}]")
    conversations = [messages] if _is_conversation(messages) else list(messages)
    params = _params_of_each(sampling_params, len(conversations))
    given = _given({"tools": tools, "chat_template_kwargs": chat_template_kwargs, **fields})
    return [
        (to_json({**_sampled_chat(own), **given, "messages": conversation}), None)
        for conversation, own in zip(conversations, params)
    ]


def stream_request(
    prompt: Prompt | Sequence[Message], sampling_params: SamplingParams | None, fields: Mapping[str, Any]
) -> tuple[str, str, str | None]:
    """The path and the body of a request, and the prompt where it is a text."""
    streamed = {**_given(fields), "stream": True, "stream_options": {"include_usage": True}}
    if _is_conversation(prompt):
        body = {**_sampled_chat(sampling_params), **streamed, "messages": prompt}
        return CHAT, to_json(body), None
    content = content_of(prompt)  # type: ignore[arg-type]
    body = {**_sampled(sampling_params), **streamed, "prompt": content}
    return COMPLETIONS, to_json(body), content if isinstance(content, str) else None


def pooling_requests(prompts: Prompt | Sequence[Prompt], fields: Mapping[str, Any]) -> list[tuple[str, str | list[int]]]:
    """The bodies of requests about one prompt each, and the prompts."""
    contents = [content_of(prompt) for prompt in prompt_list(prompts)]
    return [(to_json({**_given(fields), "input": content}), content) for content in contents]


def score_requests(
    data_1: Prompt | Sequence[Prompt], data_2: Prompt | Sequence[Prompt], fields: Mapping[str, Any]
) -> list[str]:
    """The bodies of requests about one pair each."""
    first, second = prompt_list(data_1), prompt_list(data_2)
    if len(first) == 1:
        first = first * len(second)
    if len(first) != len(second):
        counts = f"data_1 has {len(first)} prompts and data_2 has {len(second)}"
        raise RequestError(f"{counts}: give one, or as many", param="data_1")
    return [
        to_json({**_given(fields), "text_1": content_of(one), "text_2": content_of(other)})
        for one, other in zip(first, second)
    ]


def prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    return [prompts] if _is_prompt(prompts) else list(prompts)  # type: ignore[list-item, arg-type]


def _is_prompt(prompts: object) -> bool:
    """Whether it is one prompt, and not several."""
    if isinstance(prompts, (str, bytes, bytearray, Mapping)):
        return True
    return isinstance(prompts, Sequence) and len(prompts) > 0 and isinstance(prompts[0], Integral)


def _is_conversation(messages: object) -> bool:
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence):
        return False
    return len(messages) > 0 and isinstance(messages[0], Mapping) and "role" in messages[0]


def content_of(prompt: Prompt) -> str | list[int]:
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, (bytes, bytearray)):
        raise TypeError("a prompt is a text, token ids or a dict: decode the bytes")
    if isinstance(prompt, Mapping):
        for name in ("prompt_token_ids", "prompt"):
            if name in prompt:
                content: str | list[int] = prompt[name]
                return content
        raise TypeError("a prompt that is a dict has `prompt` or `prompt_token_ids`")
    return list(prompt)


def _params_of_each(sampling_params: Params, num_prompts: int) -> Iterable[SamplingParams | None]:
    if sampling_params is None or isinstance(sampling_params, SamplingParams):
        return [sampling_params] * num_prompts
    if len(sampling_params) != num_prompts:
        counts = f"there are {num_prompts} prompts and {len(sampling_params)} sampling_params"
        raise ValueError(f"{counts}: give one, or one for each")
    return sampling_params


def _given(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Without those that are `None`, by which vLLM's scripts mean "not given"."""
    return {name: value for name, value in fields.items() if value is not None}


def _sampled(params: SamplingParams | None) -> dict[str, Any]:
    return {**(params or SamplingParams()).to_fields(), **_TOLD}


def _sampled_chat(params: SamplingParams | None) -> dict[str, Any]:
    """A chat has two fields where a completion has one."""
    fields = _sampled(params)
    num_logprobs = fields.pop("logprobs", None)
    if num_logprobs is not None:
        fields |= {"logprobs": True, "top_logprobs": num_logprobs}
    return fields


_TOLD = {"return_token_ids": True, "return_tokens_as_token_ids": True, "return_metrics": True}


def to_json(value: object) -> str:
    return json.dumps(value, default=_plain)


def _plain(value: object) -> object:
    """What JSON has no form for: paths, and sequences and mappings of other kinds."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence):
        return list(value)
    # Arrays and numbers of NumPy and PyTorch have it.
    to_list: object = getattr(value, "tolist", None)
    if callable(to_list):
        plain: object = to_list()
        return plain
    raise TypeError(f"{value!r} is neither a text, a number, a list nor a dict")
