"""The errors of this package."""

from __future__ import annotations


class CorellaError(Exception):
    """Any error of this package."""


class OptionError(CorellaError, ValueError):
    """The model cannot be loaded, because an option or the model is wrong.

    >>> from corella import LLM
    >>> LLM(max_num_seq=8)
    Traceback (most recent call last):
        ...
    corella.errors.OptionError: there is no option max_num_seq; did you mean max_num_seqs?
    """


class RequestError(CorellaError, ValueError):
    """A request that cannot be answered, for example because a value is wrong or a prompt is too long.

    `param` is the wrong field, if a field is wrong. `code` names the kind of error. `index` is the place of the prompt
    among the prompts of the call, from 0 on.
    """

    # All but the message have defaults, so that the error can be copied and sent to another process.
    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        index: int = 0,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.index = index


class EngineError(CorellaError, RuntimeError):
    """The engine has failed, is closed, or belongs to another process."""


class UnsupportedError(CorellaError, NotImplementedError):
    """A feature of vLLM's `LLM` that Corella's `LLM` lacks. The message says what to do instead."""
