"""A model that is loaded."""

from __future__ import annotations

import atexit
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from types import TracebackType
from typing import TYPE_CHECKING, Any, Union

from corella._corella import Engine, Job, stop_courier
from corella.errors import EngineError, OptionError
from corella.output import EmbeddingOutput, EmbeddingRequestOutput, RequestOutput, read_answer
from corella.progress import UseTqdm, progress_bar
from corella.sampling_params import SamplingParams
from corella.stream import AsyncStream, Item, Stream, next_item, read_item
from corella.tokenizer import Tokenizer

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from corella.options import Options

# Threads must not enter Python while it ends.
atexit.register(stop_courier)

Prompt = Union[str, Sequence[int], Mapping[str, Any]]
"""A text, token ids, or `{"prompt": TEXT}` or `{"prompt_token_ids": IDS}`."""
Message = Mapping[str, Any]
"""A message of a conversation, such as `{"role": "user", "content": TEXT}`."""
Params = Union[SamplingParams, Sequence[SamplingParams], None]

_COMPLETIONS = "/v1/completions"
_CHAT = "/v1/chat/completions"
_EMBEDDINGS = "/v1/embeddings"


class LLM:
    """A model that is loaded and ready.

    `model` is a folder in the format of Hugging Face, a GGUF file, or the name of a model on the Hugging Face hub,
    which is fetched if it is not there. Without it, the small model that is part of the package is loaded.
    Further options are those of the command line, with `_` for `-`, and mean the same.

    Threads may share an `LLM`. Calls that run at the same time share steps, and each gets the tokens that it would
    get alone. `close`, or leaving a `with` block, ends all requests and frees the memory; so does dropping the last
    reference.

    >>> from corella import LLM, SamplingParams
    >>> with LLM(kv_cache_memory="64M", max_num_seqs=8) as llm:
    ...     params = SamplingParams(max_tokens=8, temperature=0)
    ...     outputs = llm.generate(["Once upon a time", "The fox"], params)
    >>> [len(output.outputs[0].token_ids) for output in outputs]
    [8, 8]
    """

    def __init__(self, model: str | os.PathLike[str] | None = None, **options: Unpack[Options]) -> None:
        self._engine: Engine | None = None
        keywords = {"model": model, **options}
        try:
            self._engine = Engine(json.dumps(keywords, default=_plain))
        except (ValueError, TypeError) as error:
            raise OptionError(str(error)) from None
        except RuntimeError as error:
            raise EngineError(str(error)) from None

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        *,
        use_tqdm: UseTqdm = False,
        **fields: Any,
    ) -> list[RequestOutput]:
        """Continues each prompt, and returns the answers in the order of the prompts.

        All prompts are one batch: the engine computes as many at once as it has room for. `sampling_params` are
        for all prompts, or a list with those of each. With `use_tqdm`, a bar shows how many prompts are answered,
        if tqdm is installed. `fields` are further fields of `/v1/completions`.

        Raises a `RequestError` if a prompt cannot be answered; the others are cancelled then.
        """
        requests = _completions(prompts, sampling_params, fields)
        return self._answer(_COMPLETIONS, requests, use_tqdm)

    async def agenerate(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: Params = None, **fields: Any
    ) -> list[RequestOutput]:
        """The same as `generate`, without blocking the event loop. Cancelling the task ends its requests."""
        requests = _completions(prompts, sampling_params, fields)
        return await self._answer_async(_COMPLETIONS, requests)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params = None,
        use_tqdm: UseTqdm = False,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> list[RequestOutput]:
        """Writes the next message of a conversation, or of each of several.

        `use_tqdm` is as in `generate`. `fields` are further fields of `/v1/chat/completions`, such as `tool_choice` and `response_format`.

        >>> from corella import LLM, SamplingParams
        >>> with LLM(kv_cache_memory="64M") as llm:
        ...     question = [{"role": "user", "content": "Tell me a story about a fox."}]
        ...     [output] = llm.chat(question, SamplingParams(max_tokens=16, temperature=0))
        >>> output.outputs[0].finish_reason
        'length'
        """
        requests = _chats(messages, sampling_params, tools, chat_template_kwargs, fields)
        return self._answer(_CHAT, requests, use_tqdm)

    async def achat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> list[RequestOutput]:
        """The same as `chat`, without blocking the event loop."""
        requests = _chats(messages, sampling_params, tools, chat_template_kwargs, fields)
        return await self._answer_async(_CHAT, requests)

    def stream(
        self, prompt: Prompt | Sequence[Message], sampling_params: SamplingParams | None = None, **fields: Any
    ) -> Stream:
        """Answers a prompt, or a conversation, and hands on text as it comes. The request begins at once.

        >>> from corella import LLM, SamplingParams
        >>> with LLM(kv_cache_memory="64M") as llm:
        ...     question = [{"role": "user", "content": "Hello!"}]
        ...     for delta in llm.stream(question, SamplingParams(max_tokens=8, temperature=0)):
        ...         num_characters = len(delta.text)
        """
        path, body, text = _streamed(prompt, sampling_params, fields)
        engine = self._open_engine()
        return Stream(_start(engine, path, body), text, engine.token_texts)

    def astream(
        self, prompt: Prompt | Sequence[Message], sampling_params: SamplingParams | None = None, **fields: Any
    ) -> AsyncStream:
        """The same as `stream`, for `async for`."""
        path, body, text = _streamed(prompt, sampling_params, fields)
        engine = self._open_engine()
        return AsyncStream(_start(engine, path, body), text, engine.token_texts)

    def embed(
        self, prompts: Prompt | Sequence[Prompt], *, use_tqdm: UseTqdm = False, **fields: Any
    ) -> list[EmbeddingRequestOutput]:
        """Makes a vector of each prompt, in the order of the prompts.

        `use_tqdm` is as in `generate`. `fields` are further fields of `/v1/embeddings`, such as `pooling`, `dimensions` and `normalize`.

        >>> from corella import LLM
        >>> with LLM(kv_cache_memory="64M") as llm:
        ...     [fox, owl] = llm.embed(["a fox", "an owl"])
        >>> len(fox.outputs.embedding) == len(owl.outputs.embedding)
        True
        """
        contents = [_content(prompt) for prompt in _listed(prompts)]
        tokenizer = self.get_tokenizer()
        ids = [tokenizer.encode(content) if isinstance(content, str) else content for content in contents]
        bodies = [json.dumps({**fields, "input": own, "encoding_format": "float"}, default=_plain) for own in ids]
        return [
            EmbeddingRequestOutput(
                request_id=answer["id"],
                prompt=content if isinstance(content, str) else None,
                prompt_token_ids=own,
                outputs=EmbeddingOutput(answer["data"][0]["embedding"]),
            )
            for answer, content, own in zip(self._post_all(_EMBEDDINGS, bodies, use_tqdm), contents, ids)
        ]

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer, which turns texts into token ids and back."""
        return Tokenizer(self._open_engine(), lambda body: self.post("/tokenize", body))

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Asks any endpoint of the API that takes JSON, without a socket, and returns what it answers.

        Answers are whole: `stream` must be false, which at `/api/chat` and `/api/generate` has to be said.

        >>> from corella import LLM
        >>> with LLM(kv_cache_memory="64M") as llm:
        ...     llm.post("/tokenize", {"prompt": "a fox"})["count"]
        2
        """
        job = _start_all(self._open_engine(), path, [json.dumps(body, default=_plain)])
        item = job.next()
        if item is None:
            raise _lost()
        return read_item(item)

    @property
    def name(self) -> str:
        """The model's name: that of its folder or file."""
        return self._open_engine().name

    @property
    def max_model_len(self) -> int:
        """Most tokens of a prompt and its answer together."""
        return self._open_engine().max_model_len

    @property
    def summary(self) -> str:
        """What runs, in one line: model, instruction set, threads, memory."""
        return self._open_engine().summary

    @property
    def num_live_requests(self) -> int:
        """How many requests wait or run."""
        return self._open_engine().num_live_requests

    def close(self) -> None:
        """Ends all requests and frees the memory. What waits for an answer gets an `EngineError`."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<LLM {self._engine.name}>" if self._engine else "<LLM, closed>"

    def _open_engine(self) -> Engine:
        if self._engine is None:
            raise EngineError("this LLM is closed")
        return self._engine

    def _answer(self, path: str, requests: list[tuple[str, str | None]], use_tqdm: UseTqdm) -> list[RequestOutput]:
        engine = self._open_engine()
        job = _start_all(engine, path, [body for body, _ in requests])
        answers = _Answers(engine, requests)
        try:
            with progress_bar(use_tqdm, len(requests)) as advance:
                while not answers.are_all_there():
                    answers.read(job.next())
                    advance()
        finally:
            job.cancel()
        return answers.in_order()

    def _post_all(self, path: str, bodies: list[str], use_tqdm: UseTqdm) -> list[dict[str, Any]]:
        """The whole answers to bodies, in their order."""
        job = _start_all(self._open_engine(), path, bodies)
        answers: dict[int, dict[str, Any]] = {}
        try:
            with progress_bar(use_tqdm, len(bodies)) as advance:
                while len(answers) < len(bodies):
                    item = job.next()
                    if item is None:
                        raise _lost()
                    answers[item[0]] = read_item(item)
                    advance()
        finally:
            job.cancel()
        return [answers[index] for index in range(len(bodies))]

    async def _answer_async(self, path: str, requests: list[tuple[str, str | None]]) -> list[RequestOutput]:
        engine = self._open_engine()
        job = _start_all(engine, path, [body for body, _ in requests])
        answers = _Answers(engine, requests)
        try:
            while not answers.are_all_there():
                answers.read(await next_item(job))
        finally:
            job.cancel()
        return answers.in_order()


class _Answers:
    """Answers that come in any order."""

    def __init__(self, engine: Engine, requests: list[tuple[str, str | None]]) -> None:
        self._engine = engine
        self._prompts = [prompt for _, prompt in requests]
        self._answers: dict[int, RequestOutput] = {}

    def are_all_there(self) -> bool:
        return len(self._answers) == len(self._prompts)

    def read(self, item: Item | None) -> None:
        if item is None:
            raise _lost()
        index = item[0]
        self._answers[index] = read_answer(read_item(item), self._prompts[index], self._engine.token_texts)

    def in_order(self) -> list[RequestOutput]:
        return [self._answers[index] for index in range(len(self._prompts))]


def _lost() -> EngineError:
    return EngineError("the request was cut off, because the LLM was closed")


def _start_all(engine: Engine, path: str, bodies: list[str]) -> Job:
    try:
        return engine.answer_all(path, bodies)
    except RuntimeError as error:
        raise EngineError(str(error)) from None


def _start(engine: Engine, path: str, body: str) -> Job:
    try:
        return engine.stream(path, body)
    except RuntimeError as error:
        raise EngineError(str(error)) from None


def _completions(
    prompts: Prompt | Sequence[Prompt], sampling_params: Params, fields: Mapping[str, Any]
) -> list[tuple[str, str | None]]:
    """The bodies of requests, and their prompts where they are texts."""
    listed = _listed(prompts)
    params = _params_of_each(sampling_params, len(listed))
    requests = []
    for prompt, own in zip(listed, params):
        content = _content(prompt)
        body = {**_sampled(own), **fields, "prompt": content}
        requests.append((json.dumps(body, default=_plain), content if isinstance(content, str) else None))
    return requests


def _chats(
    messages: Sequence[Message] | Sequence[Sequence[Message]],
    sampling_params: Params,
    tools: Sequence[Mapping[str, Any]] | None,
    chat_template_kwargs: Mapping[str, Any] | None,
    fields: Mapping[str, Any],
) -> list[tuple[str, str | None]]:
    conversations = [messages] if _is_conversation(messages) else list(messages)
    params = _params_of_each(sampling_params, len(conversations))
    given = {"tools": tools, "chat_template_kwargs": chat_template_kwargs, **fields}
    given = {name: value for name, value in given.items() if value is not None}
    return [
        (json.dumps({**_sampled_chat(own), **given, "messages": conversation}, default=_plain), None)
        for conversation, own in zip(conversations, params)
    ]


def _streamed(
    prompt: Prompt | Sequence[Message], sampling_params: SamplingParams | None, fields: Mapping[str, Any]
) -> tuple[str, str, str | None]:
    """The path and the body of a request, and the prompt where it is a text."""
    streamed = {**fields, "stream": True, "stream_options": {"include_usage": True}}
    if _is_conversation(prompt):
        body = {**_sampled_chat(sampling_params), **streamed, "messages": prompt}
        return _CHAT, json.dumps(body, default=_plain), None
    content = _content(prompt)  # type: ignore[arg-type]
    body = {**_sampled(sampling_params), **streamed, "prompt": content}
    return _COMPLETIONS, json.dumps(body, default=_plain), content if isinstance(content, str) else None


def _listed(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
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


def _content(prompt: Prompt) -> str | list[int]:
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


def _sampled(params: SamplingParams | None) -> dict[str, Any]:
    return {**(params or SamplingParams()).to_fields(), **_WITH_IDS}


def _sampled_chat(params: SamplingParams | None) -> dict[str, Any]:
    """A chat has two fields where a completion has one."""
    fields = _sampled(params)
    num_logprobs = fields.pop("logprobs", None)
    if num_logprobs is not None:
        fields |= {"logprobs": True, "top_logprobs": num_logprobs}
    return fields


_WITH_IDS = {"return_token_ids": True, "return_tokens_as_token_ids": True}


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
