"""What can go wrong, in words for whoever can change it."""

from __future__ import annotations


class CorellaError(Exception):
    """Any error of this package."""


class OptionError(CorellaError, ValueError):
    """The model cannot be loaded as it was asked for: a wrong option, or a wrong model.

    >>> from corella import LLM
    >>> LLM(max_num_seq=8)
    Traceback (most recent call last):
        ...
    corella.errors.OptionError: there is no option max_num_seq; did you mean max_num_seqs?
    """


class RequestError(CorellaError, ValueError):
    """A request that cannot be answered: a wrong value, a prompt that is too long.

    `param` is the field that is wrong, if it is one, `code` a name for what is wrong, and `index` the number of
    the prompt among those of the call.
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
    """Something that vLLM's `LLM` has and this one has not. The message says what to do instead."""
