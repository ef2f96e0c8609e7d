"""Makes requests of the API from the arguments of the methods of `LLM`."""

from __future__ import annotations

import json
import os
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any, Callable, Union

from corella.errors import RequestError, UnsupportedError
from corella.sampling_params import SamplingParams

Prompt = Union[str, Sequence[int], Mapping[str, Any]]
"""A text, token ids, or `{"prompt": TEXT}` or `{"prompt_token_ids": IDS}`."""
Message = Mapping[str, Any]
"""A message of a conversation, such as `{"role": "user", "content": TEXT}`."""
Params = Union[SamplingParams, Sequence[SamplingParams], None]

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
EMBEDDINGS = "/v1/embeddings"
CLASSIFY = "/classify"


def completion_requests(
    prompts: Prompt | Sequence[Prompt], sampling_params: Params, fields: Mapping[str, Any]
) -> list[tuple[str, str | None]]:
    """Returns the body of each request, with the prompt if the prompt is a text."""
    contents = contents_of(prompts)
    given = _given(fields)
    params = _params_of_each(sampling_params, given, len(contents))
    bodies = _bodies([{**_sampled(own), **given, "prompt": content} for content, own in zip(contents, params)])
    return [(body, content if isinstance(content, str) else None) for body, content in zip(bodies, contents)]


def chat_requests(
    messages: Sequence[Message] | Sequence[Sequence[Message]],
    sampling_params: Params,
    tools: Sequence[Mapping[str, Any]] | None,
    chat_template_kwargs: Mapping[str, Any] | None,
    fields: Mapping[str, Any],
) -> list[tuple[str, str | None]]:
    conversations = [_conversation_of(messages, index) for index, messages in enumerate(_conversations_in(messages))]
    given = _given({"tools": tools, "chat_template_kwargs": chat_template_kwargs, **fields})
    params = _params_of_each(sampling_params, given, len(conversations))
    bodies = [
        {**_sampled_chat(own), **given, "messages": conversation} for conversation, own in zip(conversations, params)
    ]
    return [(body, None) for body in _bodies(bodies)]


def stream_request(
    prompt: Prompt | Sequence[Message], sampling_params: SamplingParams | None, fields: Mapping[str, Any]
) -> tuple[str, str, str | None]:
    """Returns the path and the body of a request, and the prompt if the prompt is a text."""
    given = _given(fields)
    [params] = _params_of_each(sampling_params, given, 1)
    streamed = {**given, "stream": True, "stream_options": {"include_usage": True}}
    if _is_conversation(prompt):
        body = {**_sampled_chat(params), **streamed, "messages": prompt}
        return CHAT, to_json(body), None
    content = _content_of(prompt, 0)
    body = {**_sampled(params), **streamed, "prompt": content}
    return COMPLETIONS, to_json(body), content if isinstance(content, str) else None


def check_requests(
    prompts: Prompt | Sequence[Prompt] | Sequence[Message] | Sequence[Sequence[Message]],
    sampling_params: Params,
    pooling_task: str | None,
    fields: Mapping[str, Any],
) -> tuple[str, list[str | RequestError | TypeError]]:
    """Returns the path and the bodies of the requests that `generate`, `chat`, `embed` or `classify` would make. A
    prompt that cannot be answered has its error in place of a body."""
    listed: Any = list(prompts) if isinstance(prompts, Iterator) else prompts
    is_chat = _is_conversation(listed) or (isinstance(listed, (list, tuple)) and any(map(_is_conversation, listed)))
    if pooling_task not in (None, "embed", "classify"):
        raise unknown_pooling_task(pooling_task)
    rows = _conversations_in(listed) if is_chat and pooling_task is None else _prompts_in(listed)
    given = _given(fields)
    params = _params_of_each(sampling_params, given, len(rows))
    if pooling_task is not None:
        path = {"embed": EMBEDDINGS, "classify": CLASSIFY}[pooling_task]
        read, name, sampled = _content_of, "input", None
    elif is_chat:
        path, read, name, sampled = CHAT, _conversation_of, "messages", _sampled_chat
    else:
        path, read, name, sampled = COMPLETIONS, _content_of, "prompt", _sampled
    bodies: list[str | RequestError | TypeError] = []
    for index, (row, own) in enumerate(zip(rows, params)):
        try:
            of_params = {} if sampled is None else sampled(own)
            bodies.append(_body({**of_params, **given, name: read(row, index)}, index, len(rows)))
        except (RequestError, TypeError) as error:
            bodies.append(error)
    return path, bodies


def unknown_pooling_task(name: object) -> UnsupportedError:
    why = "a prompt has one vector, and its tokens have none of their own; `score` compares two texts"
    return UnsupportedError(f'pooling_task is {name!r}, and can be "embed" or "classify": {why}')


def pooling_requests(prompts: Prompt | Sequence[Prompt], fields: Mapping[str, Any]) -> list[tuple[str, str | list[int]]]:
    """Returns the body of a request for each prompt, with the prompt."""
    contents, given = contents_of(prompts), _given(fields)
    bodies = _bodies([{**given, "input": content} for content in contents])
    return list(zip(bodies, contents))


def score_requests(
    data_1: Prompt | Sequence[Prompt], data_2: Prompt | Sequence[Prompt], fields: Mapping[str, Any]
) -> list[str]:
    """Returns the body of a request for each pair of texts."""
    first, second = contents_of(data_1), contents_of(data_2)
    if len(first) == 1:
        first = first * len(second)
    if len(first) != len(second):
        counts = f"data_1 has {len(first)} prompts and data_2 has {len(second)}"
        raise RequestError(f"{counts}: give one prompt in data_1, or as many as in data_2", param="data_1")
    given = _given(fields)
    return _bodies([{**given, "text_1": one, "text_2": other} for one, other in zip(first, second)])


def contents_of(prompts: Prompt | Sequence[Prompt]) -> list[str | list[int]]:
    """Returns the text or the token ids of each prompt."""
    return [_content_of(prompt, index) for index, prompt in enumerate(_prompts_in(prompts))]


def _prompts_in(prompts: Any) -> list[Any]:
    if hasattr(prompts, "columns"):
        raise TypeError("prompts are a table: give one of its columns")
    is_one = isinstance(prompts, (str, bytes, bytearray, Mapping)) or not isinstance(prompts, Iterable)
    listed: list[Any] = [prompts] if is_one else list(prompts)
    if is_one or not listed or not isinstance(listed[0], Integral):
        return listed
    # A column of a table or an array is rarely meant as one prompt.
    if hasattr(prompts, "dtype"):
        wanted = "give texts, or put the column in a list if it has the token ids of one prompt"
        raise _wrong("prompts", prompts, f"a column of numbers; {wanted}")
    return [listed]


def _is_conversation(messages: object) -> bool:
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence) or not messages:
        return False
    first = messages[0]
    return "role" in first if isinstance(first, Mapping) else hasattr(first, "role")


def _conversations_in(messages: Any) -> list[Any]:
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Iterable):
        wanted = "a conversation is a list of messages, such as [{'role': 'user', 'content': TEXT}]"
        raise _wrong("messages", messages, wanted)
    return [messages] if _is_conversation(messages) else list(messages)


def _conversation_of(messages: Any, index: int) -> Any:
    """Returns the messages of a conversation. Refuses a missing cell of a table, such as pandas' NaN."""
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Iterable):
        raise _wrong(f"prompt {index}", messages, "a conversation is a list of messages")
    for message in messages:
        content = message.get("content", "") if isinstance(message, Mapping) else ""
        if content is not None and not isinstance(content, Iterable):
            raise _wrong(f"prompt {index}: content", content, "the content of a message is a text or a list of parts")
    return messages


def _content_of(prompt: object, index: int) -> str | list[int]:
    place = f"prompt {index}"
    if isinstance(prompt, Mapping):
        prompt = _prompt_of_dict(prompt, index)
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, (bytes, bytearray)):
        raise _wrong(place, prompt, "decode the bytes")
    if not isinstance(prompt, Iterable):
        raise _wrong(place, prompt, "a prompt is a text, token ids or a dict")
    ids = list(prompt)
    if any(isinstance(element, (str, list, tuple, Mapping)) for element in ids):
        raise _wrong(place, prompt, "a prompt that is a list has token ids; give each text as a prompt of its own")
    return ids


def _prompt_of_dict(prompt: Mapping[str, Any], index: int) -> object:
    given = _given(prompt)
    ids, text = given.pop("prompt_token_ids", None), given.pop("prompt", None)
    if "role" in given:
        raise _wrong(f"prompt {index}", prompt, "messages are for `chat`")
    for name in given:
        raise RequestError(f"prompt {index} has `{name}`: {_OF_DICT}", param=name, index=index)
    if ids is None and text is None:
        raise _wrong(f"prompt {index}", prompt, _OF_DICT)
    return text if ids is None else ids


_OF_DICT = "a prompt that is a dict has `prompt` or `prompt_token_ids`, and nothing else"


def _params_of_each(
    sampling_params: Params, given: dict[str, Any], num_prompts: int
) -> Sequence[SamplingParams | None]:
    """Returns the parameters of each prompt, with its priority if `priority` is a list, as in vLLM."""
    params = _listed_params(sampling_params, num_prompts)
    if not isinstance(given.get("priority"), Sequence):
        return params
    priorities = given.pop("priority")
    if len(priorities) != num_prompts:
        raise ValueError(f"there are {num_prompts} prompts and {len(priorities)} priorities: give one for each")
    return [replace(own or SamplingParams(), priority=priority) for own, priority in zip(params, priorities)]


def _listed_params(sampling_params: Params, num_prompts: int) -> Sequence[SamplingParams | None]:
    if sampling_params is None or isinstance(sampling_params, SamplingParams):
        return [sampling_params] * num_prompts
    is_list = isinstance(sampling_params, Sequence) and not isinstance(sampling_params, str)
    for params in sampling_params if is_list else [sampling_params]:
        if params is not None and not isinstance(params, SamplingParams):
            wanted = "give SamplingParams(max_tokens=4), for example, or write max_tokens=4 as a keyword"
            raise _wrong("sampling_params", sampling_params, wanted)
    if len(sampling_params) != num_prompts:
        counts = f"there are {num_prompts} prompts and {len(sampling_params)} sampling_params"
        raise ValueError(f"{counts}: give one, or one for each")
    return sampling_params


def _wrong(place: str, value: object, wanted: str) -> TypeError:
    return TypeError(f"{place} is {reprlib.repr(value)}: {wanted}")


def _given(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Removes fields that are `None`, by which vLLM's scripts mean "not given"."""
    given = {name: value for name, value in fields.items() if value is not None}
    if "lora_request" in given:
        raise UnsupportedError("lora_request: a model in Python has no adapters; `corella serve --lora-modules` has")
    if "chat_template" in given:
        raise UnsupportedError("chat_template: a model has one template, which LLM(chat_template=...) sets")
    return given


def _sampled(params: SamplingParams | None) -> dict[str, Any]:
    return {**(params or SamplingParams()).to_fields(), **_TOLD}


def _sampled_chat(params: SamplingParams | None) -> dict[str, Any]:
    """Returns the fields of `params` for a chat, which has two fields for log-probabilities, unlike a completion."""
    fields = _sampled(params)
    num_logprobs = fields.pop("logprobs", None)
    if num_logprobs is not None:
        fields |= {"logprobs": True, "top_logprobs": num_logprobs}
    return fields


_TOLD = {"return_token_ids": True, "return_tokens_as_token_ids": True, "return_metrics": True}


def _bodies(requests: Sequence[Mapping[str, object]]) -> list[str]:
    return [_body(fields, index, len(requests)) for index, fields in enumerate(requests)]


def _body(fields: Mapping[str, object], index: int, num_requests: int) -> str:
    """Returns the body of a request. With several prompts, errors begin with the index of the prompt."""
    place = f"prompt {index}: " if num_requests > 1 else ""
    try:
        return to_json(fields)
    except RequestError as error:
        raise RequestError(f"{place}{error}", param=error.param, index=index) from None
    except TypeError as error:
        raise TypeError(f"{place}{error}") from None


def to_json(fields: Mapping[str, object]) -> str:
    return "{" + ", ".join(f"{json.dumps(name)}: {_value_json(name, value)}" for name, value in fields.items()) + "}"


def _value_json(name: str, value: object) -> str:
    if isinstance(value, type) and name in _OF_CLASS:
        value = _OF_CLASS[name](value)
    try:
        text = json.dumps(value, default=_plain, allow_nan=False, ensure_ascii=False)
        text.encode()
        return text
    except TypeError as error:
        raise TypeError(f"{name}: {error}") from None
    except UnicodeEncodeError as error:
        wrong = f"{name} is no valid text: it has {error.object[error.start]!r}, a half of a character"
        raise RequestError(f"{wrong} (a lone surrogate)", param=name) from None
    except ValueError:
        raise RequestError(f"{name} is {reprlib.repr(value)}: numbers must be finite", param=name) from None


_OF_CLASS: dict[str, Callable[[type], object]] = {
    "structured_outputs": lambda schema: {"json": schema},
    "response_format": lambda schema: {
        "type": "json_schema",
        "json_schema": {"name": schema.__name__, "schema": schema},
    },
}
"""Makes the value of a field of a Pydantic class."""


def _plain(value: object) -> object:
    """Converts a value that `json` cannot encode: a path, another kind of sequence or mapping, or one of Pydantic."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence):
        return list(value)
    # Pydantic's objects are messages of clients, which have all fields that a message may have.
    if not isinstance(value, type) and callable(dump := getattr(value, "model_dump", None)):
        dumped: object = dump(exclude_none=True)
        return dumped
    # NumPy's and PyTorch's arrays and numbers have `tolist`, Pydantic's classes `model_json_schema`.
    for name in ("tolist", "model_json_schema"):
        convert: object = getattr(value, name, None)
        if callable(convert):
            plain: object = convert()
            return plain
    raise TypeError(f"{value!r} is neither a text, a number, a list nor a dict")
