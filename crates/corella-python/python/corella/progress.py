"""A progress bar, as vLLM shows one, where tqdm is installed."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any, Callable, Union

UseTqdm = Union[bool, Callable[..., Any]]
"""Whether there is a bar, or what makes one as `tqdm` does."""


@contextlib.contextmanager
def progress_bar(use_tqdm: UseTqdm, total: int) -> Iterator[Callable[[], None]]:
    """Yields what advances the bar by one of `total` prompts. Without tqdm there is no bar."""
    make = _maker(use_tqdm)
    if make is None:
        yield lambda: None
        return
    bar = make(total=total, desc="Processed prompts")

    def advance() -> None:
        bar.update(1)

    try:
        yield advance
    finally:
        bar.close()


def _maker(use_tqdm: UseTqdm) -> Callable[..., Any] | None:
    if callable(use_tqdm):
        return use_tqdm
    if not use_tqdm:
        return None
    try:
        module = importlib.import_module("tqdm.auto")
    except ImportError:
        return None
    tqdm: Callable[..., Any] = module.tqdm
    return tqdm
