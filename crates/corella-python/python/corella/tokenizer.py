"""The tokenizer of a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

from corella._corella import Engine
from corella.errors import EngineError, RequestError

Message = Mapping[str, Any]

_ALL = (
    "it has encode, decode, batch_decode, apply_chat_template and vocab_size, and can be called; for more, "
    "transformers' AutoTokenizer reads the model's folder"
)


class Tokenizer:
    """Turns texts into token ids and back. The methods have the names of those of Hugging Face's tokenizers.

    >>> from corella import LLM
    >>> with LLM(kv_cache_memory="64M") as llm:
    ...     tokenizer = llm.get_tokenizer()
    ...     tokenizer.decode(tokenizer.encode("a fox"))
    'a fox'
    """

    def __init__(self, engine: Engine, tokenize: Callable[[Mapping[str, Any]], dict[str, Any]]) -> None:
        self._engine = engine
        self._tokenize = tokenize

    if not TYPE_CHECKING:

        def __getattr__(self, name):
            raise AttributeError(f"the tokenizer has no {name}: {_ALL}")

    def __call__(self, text: str | Sequence[str], add_special_tokens: bool = True) -> dict[str, Any]:
        """Returns the token ids of a text, or of each text of a list, as `input_ids`.

        >>> from corella import LLM
        >>> with LLM(kv_cache_memory="64M") as llm:
        ...     tokenizer = llm.get_tokenizer()
        ...     len(tokenizer(["a fox", "a cub"])["input_ids"])
        2
        """
        is_one = isinstance(text, str)
        listed = [self.encode(one, add_special_tokens) for one in ([text] if is_one else text)]
        return {"input_ids": listed[0] if is_one else listed}

    def batch_decode(self, sequences: Sequence[Sequence[int]], skip_special_tokens: bool = False) -> list[str]:
        return [self.decode(token_ids, skip_special_tokens) for token_ids in sequences]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        if not isinstance(text, str):
            raise TypeError(f"encode takes one text, not {type(text).__name__}: tokenizer(TEXTS) takes a list of them")
        try:
            return self._engine.encode(text, add_special_tokens)
        except RuntimeError as error:
            raise EngineError(str(error)) from None

    def decode(self, token_ids: int | Sequence[int], skip_special_tokens: bool = False) -> str:
        """Raises a `RequestError` if the vocabulary lacks one of the ids."""
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        for index, token_id in enumerate(ids):
            if not 0 <= token_id < self.vocab_size:
                reason = f"token_ids[{index}] is {token_id}, and the vocabulary ends at {self.vocab_size - 1}"
                raise RequestError(reason, param="token_ids")
        try:
            return self._engine.decode(ids, skip_special_tokens)
        except RuntimeError as error:
            raise EngineError(str(error)) from None

    @overload
    def apply_chat_template(
        self,
        conversation: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        tokenize: Literal[True] = True,
        **chat_template_kwargs: Any,
    ) -> list[int]: ...

    @overload
    def apply_chat_template(
        self,
        conversation: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        tokenize: Literal[False],
        **chat_template_kwargs: Any,
    ) -> str: ...

    def apply_chat_template(
        self,
        conversation: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        **chat_template_kwargs: Any,
    ) -> list[int] | str:
        """Returns the prompt of a conversation: its token ids, or its text with `tokenize=False`.

        `chat_template_kwargs` are variables of the template, such as `enable_thinking`.
        """
        body: dict[str, Any] = {"messages": conversation, "add_generation_prompt": add_generation_prompt}
        if tools is not None:
            body["tools"] = tools
        if chat_template_kwargs:
            body["chat_template_kwargs"] = chat_template_kwargs
        token_ids: list[int] = self._tokenize(body)["tokens"]
        return token_ids if tokenize else self.decode(token_ids)

    @property
    def vocab_size(self) -> int:
        return self._engine.vocab_size

    def __len__(self) -> int:
        return self.vocab_size
