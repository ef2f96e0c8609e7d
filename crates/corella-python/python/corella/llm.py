"""A model that is loaded."""

from __future__ import annotations

import atexit
import inspect
import json
import os
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Callable, Literal, NoReturn, TypeVar

from corella._corella import Engine, Job, stop_courier
from corella.errors import EngineError, OptionError, RequestError, UnsupportedError
from corella.options import ForeignOptions, Options
from corella.output import RequestOutput, read_answer
from corella.pooled_output import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from corella.progress import UseTqdm, progress_bar
from corella.request import (
    CHAT,
    CLASSIFY,
    COMPLETIONS,
    EMBEDDINGS,
    Message,
    Params,
    Prompt,
    chat_requests,
    check_requests,
    completion_requests,
    pooling_requests,
    score_requests,
    stream_request,
    to_json,
    unknown_pooling_task,
)
from corella.sampling_params import SamplingParams
from corella.stream import AsyncStream, Item, Stream, next_item, read_item
from corella.tokenizer import Tokenizer

if TYPE_CHECKING:
    from typing_extensions import Unpack

# Threads must not enter Python while it ends.
atexit.register(stop_courier)

_Bodies = TypeVar("_Bodies", str, "list[str]")

_SCORE = "/score"


class LLM:
    """A model that is loaded and ready.

    `model` is a folder in the format of Hugging Face, a GGUF file, or the name of a model on the Hugging Face hub,
    which is fetched if this machine does not have it. Without `model`, the small model that is part of the package is
    loaded. `corella.options.Options` lists the further options, which are those of the command line with `_` for `-`.

    Threads may share an `LLM`. Calls that run at the same time share steps, and each call gets the tokens that it
    would get alone. `close`, the end of a `with` block, and dropping the last reference end all requests and free the
    memory.

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
        for name in SamplingParams.__dataclass_fields__.keys() & options.keys() - {"seed"}:
            instead = f"use SamplingParams({name}=...) or override_generation_config"
            raise OptionError(f"there is no option {name}: {instead}")
        try:
            self._engine = Engine(to_json(keywords))
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

        All prompts are one batch: the engine computes as many at once as it has room for. `sampling_params` apply to
        all prompts, or are a list with one for each prompt. With `use_tqdm`, a progress bar on standard error shows how
        many prompts are answered; it is tqdm's if tqdm is installed. `fields` are further fields of `/v1/completions`.

        Raises a `RequestError` if a prompt cannot be answered. All prompts are checked before the first is computed.
        """
        requests = completion_requests(prompts, sampling_params, fields)
        return self._answer(COMPLETIONS, requests, use_tqdm)

    async def agenerate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        *,
        use_tqdm: UseTqdm = False,
        **fields: Any,
    ) -> list[RequestOutput]:
        """The same as `generate`, without blocking the event loop. Cancelling the task ends the requests."""
        requests = completion_requests(prompts, sampling_params, fields)
        return await self._answer_async(COMPLETIONS, requests, use_tqdm)

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

        `use_tqdm` is as in `generate`. `fields` are further fields of `/v1/chat/completions`, such as `tool_choice` and
        `response_format`.

        >>> from corella import LLM, SamplingParams
        >>> with LLM(kv_cache_memory="64M") as llm:
        ...     question = [{"role": "user", "content": "Tell me a story about a fox."}]
        ...     [output] = llm.chat(question, SamplingParams(max_tokens=16, temperature=0))
        >>> output.outputs[0].finish_reason
        'length'
        """
        requests = chat_requests(messages, sampling_params, tools, chat_template_kwargs, fields)
        return self._answer(CHAT, requests, use_tqdm)

    async def achat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params = None,
        use_tqdm: UseTqdm = False,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> list[RequestOutput]:
        """The same as `chat`, without blocking the event loop."""
        requests = chat_requests(messages, sampling_params, tools, chat_template_kwargs, fields)
        return await self._answer_async(CHAT, requests, use_tqdm)

    def check(
        self,
        prompts: Prompt | Sequence[Prompt] | Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params = None,
        *,
        pooling_task: Literal["embed", "classify"] | None = None,
        **fields: Any,
    ) -> list[RequestError | TypeError | None]:
        """Returns for each prompt the reason why it cannot be answered, as an error, or `None`. Computes nothing.

        The arguments are those of `generate` or `chat`, or with `pooling_task` those of `embed` or `classify`.

        >>> from corella import LLM
        >>> with LLM(kv_cache_memory="64M") as llm:
        ...     rows = ["Once upon a time", "", "The fox"]
        ...     good = [row for row, error in zip(rows, llm.check(rows)) if error is None]
        >>> good
        ['Once upon a time', 'The fox']
        """
        path, checked = check_requests(prompts, sampling_params, pooling_task, fields)
        errors = [None if isinstance(body, str) else body for body in checked]
        bodies = [(index, body) for index, body in enumerate(checked) if isinstance(body, str)]
        job = _start(self._open_engine().check_all, path, [body for _, body in bodies])
        while (item := job.next()) is not None:
            number, status, answer = item
            try:
                read_item((bodies[number][0], status, answer), len(checked))
            except RequestError as error:
                errors[error.index] = error
        return errors

    def stream(
        self, prompt: Prompt | Sequence[Message], sampling_params: SamplingParams | None = None, **fields: Any
    ) -> Stream:
        """Answers a prompt or a conversation, and returns the text as it arrives. The request begins at once.

        >>> from corella import LLM, SamplingParams
        >>> with LLM(kv_cache_memory="64M") as llm:
        ...     question = [{"role": "user", "content": "Hello!"}]
        ...     for delta in llm.stream(question, SamplingParams(max_tokens=8, temperature=0)):
        ...         num_characters = len(delta.text)
        """
        path, body, text = stream_request(prompt, sampling_params, fields)
        engine = self._open_engine()
        return Stream(_start(engine.stream, path, body), text, engine.token_texts)

    def astream(
        self, prompt: Prompt | Sequence[Message], sampling_params: SamplingParams | None = None, **fields: Any
    ) -> AsyncStream:
        """The same as `stream`, for `async for`."""
        path, body, text = stream_request(prompt, sampling_params, fields)
        engine = self._open_engine()
        return AsyncStream(_start(engine.stream, path, body), text, engine.token_texts)

    def embed(
        self, prompts: Prompt | Sequence[Prompt], *, use_tqdm: UseTqdm = False, **fields: Any
    ) -> list[EmbeddingRequestOutput]:
        """Returns a vector for each prompt, in the order of the prompts.

        `use_tqdm` is as in `generate`. `fields` are further fields of `/v1/embeddings`, such as `pooling`, `dimensions`
        and `normalize`.

        >>> from corella import LLM
        >>> with LLM(kv_cache_memory="64M") as llm:
        ...     [fox, owl] = llm.embed(["a fox", "an owl"])
        >>> len(fox.outputs.embedding) == len(owl.outputs.embedding)
        True
        """
        return [
            EmbeddingRequestOutput(*about, outputs=EmbeddingOutput(row["embedding"]))
            for about, row in self._pool(EMBEDDINGS, prompts, {**fields, "encoding_format": "float"}, use_tqdm)
        ]

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_task: Literal["embed", "classify"] | str = "embed",
        use_tqdm: UseTqdm = False,
        **fields: Any,
    ) -> list[PoolingRequestOutput]:
        """Returns the vectors of `embed`, or the probabilities of `classify`, in vLLM's general form."""
        if pooling_task == "embed":
            vectors = self.embed(prompts, use_tqdm=use_tqdm, **fields)
            return [_pooled(output, output.outputs.embedding) for output in vectors]
        if pooling_task == "classify":
            classes = self.classify(prompts, use_tqdm=use_tqdm, **fields)
            return [_pooled(output, output.outputs.probs) for output in classes]
        raise unknown_pooling_task(pooling_task)

    def classify(
        self, prompts: Prompt | Sequence[Prompt], *, use_tqdm: UseTqdm = False, **fields: Any
    ) -> list[ClassificationRequestOutput]:
        """Returns the probability of each class for each prompt.

        The model's architecture must be one whose name ends in `ForSequenceClassification`.

        `use_tqdm` is as in `generate`. `fields` are further fields of `/classify`.
        """
        return [
            ClassificationRequestOutput(*about, outputs=ClassificationOutput(row["probs"], row["label"]))
            for about, row in self._pool(CLASSIFY, prompts, fields, use_tqdm)
        ]

    def score(
        self,
        data_1: Prompt | Sequence[Prompt],
        data_2: Prompt | Sequence[Prompt],
        *,
        use_tqdm: UseTqdm = False,
        **fields: Any,
    ) -> list[ScoringRequestOutput]:
        """Scores how well texts fit: one text with each of a list, or the texts of two lists pair by pair.

        A cross-encoder or a reranker reads both texts at once. With other models the score is the cosine of the angle
        between their vectors. `fields` are further fields of `/score`, such as `pooling`.

        >>> from corella import LLM
        >>> with LLM(kv_cache_memory="64M") as llm:
        ...     outputs = llm.score("a fox", ["a fox", "the price of tea"], pooling="mean")
        >>> [round(output.outputs.score, 4) for output in outputs][0]
        1.0
        """
        answers = self._post_all(_SCORE, score_requests(data_1, data_2, fields), use_tqdm)
        return [ScoringRequestOutput(answer["id"], ScoringOutput(answer["data"][0]["score"])) for answer in answers]

    def beam_search(self, *_: object, **__: object) -> NoReturn:
        """Raises an `UnsupportedError`: answers are drawn one token at a time, each by itself."""
        instead = "SamplingParams(n=N, best_of=M) draws M answers and returns the N likeliest"
        raise UnsupportedError(f"there is no beam search; {instead}")

    def get_default_sampling_params(self) -> SamplingParams:
        """The sampling parameters of the model's files, or of `generation_config` and `override_generation_config`.

        >>> from corella import LLM
        >>> with LLM(kv_cache_memory="64M") as llm:
        ...     llm.get_default_sampling_params()
        SamplingParams(temperature=0.4, top_p=0.8)
        """
        return SamplingParams(**json.loads(self._open_engine().generation_defaults))

    def reset_prefix_cache(self) -> bool:
        """Forgets the keys and values of earlier prompts. Returns false, and forgets nothing, while requests run."""
        try:
            self.post("/reset_prefix_cache", {})
        except RequestError as error:
            if error.status == 409:
                return False
            raise
        return True

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer, which turns texts into token ids and back."""
        return Tokenizer(self._open_engine(), lambda body: self.post("/tokenize", body))

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Posts JSON to an endpoint of the API, without a socket, and returns the answer.

        Answers are whole, so `stream` must be false. `/api/chat` and `/api/generate` stream unless the body says so.

        >>> from corella import LLM
        >>> with LLM(kv_cache_memory="64M") as llm:
        ...     llm.post("/tokenize", {"prompt": "a fox"})["count"]
        2
        """
        job = _start(self._open_engine().answer_all, path, [to_json(body)])
        item = job.next()
        if item is None:
            raise _lost()
        return read_item(item)

    @property
    def name(self) -> str:
        """The model's name, which is the name of its folder or file."""
        return self._open_engine().name

    @property
    def max_model_len(self) -> int:
        """The limit of tokens of a prompt and its answer together."""
        return self._open_engine().max_model_len

    @property
    def summary(self) -> str:
        """The engine's configuration in one line: model, instruction set, threads, memory."""
        return self._open_engine().summary

    @property
    def num_live_requests(self) -> int:
        """The number of requests that wait or run."""
        return self._open_engine().num_live_requests

    def close(self) -> None:
        """Ends all requests and frees the memory. Calls that wait for an answer raise an `EngineError`."""
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
        job = _start(engine.answer_all, path, [body for body, _ in requests])
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
        """Returns the whole answers, in the order of the bodies."""
        job = _start(self._open_engine().answer_all, path, bodies)
        answers: dict[int, dict[str, Any]] = {}
        try:
            with progress_bar(use_tqdm, len(bodies)) as advance:
                while len(answers) < len(bodies):
                    item = job.next()
                    if item is None:
                        raise _lost()
                    answers[item[0]] = read_item(item, len(bodies))
                    advance()
        finally:
            job.cancel()
        return [answers[index] for index in range(len(bodies))]

    def _pool(
        self, path: str, prompts: Prompt | Sequence[Prompt], fields: Mapping[str, Any], use_tqdm: UseTqdm
    ) -> list[tuple[tuple[str, str | None, list[int]], dict[str, Any]]]:
        """Returns for each prompt the fields of `PooledRequestOutput`, and the prompt's row of the answer."""
        requests = pooling_requests(prompts, fields)
        answers = self._post_all(path, [body for body, _ in requests], use_tqdm)
        tokenizer = self.get_tokenizer()
        special = fields.get("add_special_tokens")
        pooled = []
        for answer, (_, content) in zip(answers, requests):
            if isinstance(content, str):
                text, ids = content, tokenizer.encode(content, True if special is None else special)
            else:
                text, ids = None, content
            pooled.append(((answer["id"], text, ids), answer["data"][0]))
        return pooled

    async def _answer_async(
        self, path: str, requests: list[tuple[str, str | None]], use_tqdm: UseTqdm
    ) -> list[RequestOutput]:
        engine = self._open_engine()
        job = _start(engine.answer_all, path, [body for body, _ in requests])
        answers = _Answers(engine, requests)
        try:
            with progress_bar(use_tqdm, len(requests)) as advance:
                while not answers.are_all_there():
                    answers.read(await next_item(job))
                    advance()
        finally:
            job.cancel()
        return answers.in_order()


def _signature() -> inspect.Signature:
    """Lists the options by name, for the help and the completion of notebooks."""
    names = [name for name in Options.__annotations__ if name not in ForeignOptions.__annotations__]
    model = inspect.Parameter("model", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None)
    options = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in names]
    others = inspect.Parameter("options", inspect.Parameter.VAR_KEYWORD)
    return inspect.Signature([model, *options, others])


LLM.__signature__ = _signature()  # type: ignore[attr-defined]


class _Answers:
    """Collects answers, which arrive in any order."""

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
        answer = read_item(item, len(self._prompts))
        self._answers[index] = read_answer(answer, self._prompts[index], self._engine.token_texts)

    def in_order(self) -> list[RequestOutput]:
        return [self._answers[index] for index in range(len(self._prompts))]


def _lost() -> EngineError:
    return EngineError("the request was cut off, because the LLM was closed")


def _start(start: Callable[[str, _Bodies], Job], path: str, bodies: _Bodies) -> Job:
    try:
        return start(path, bodies)
    except RuntimeError as error:
        raise EngineError(str(error)) from None


def _pooled(output: EmbeddingRequestOutput | ClassificationRequestOutput, data: list[float]) -> PoolingRequestOutput:
    return PoolingRequestOutput(output.request_id, output.prompt, output.prompt_token_ids, PoolingOutput(data))
