"""A progress bar like vLLM's."""

from __future__ import annotations

import contextlib
import importlib
import sys
import time
from collections.abc import Iterator
from typing import Any, Callable, Union

UseTqdm = Union[bool, Callable[..., Any]]
"""Whether to show a progress bar, or a function that makes one, with the arguments of `tqdm`."""


@contextlib.contextmanager
def progress_bar(use_tqdm: UseTqdm, total: int) -> Iterator[Callable[[], None]]:
    """Yields a function that advances the bar by one of `total` prompts."""
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
        return PlainBar
    tqdm: Callable[..., Any] = module.tqdm
    return tqdm


class PlainBar:
    """A bar on standard error, if tqdm is not installed. Without a terminal, it is one line at the end."""

    _WIDTH = 20
    _INTERVAL_S = 0.1

    def __init__(self, total: int, desc: str) -> None:
        self._total = total
        self._desc = desc
        self._done = 0
        self._start = self._shown = time.monotonic()
        self._stream = sys.stderr
        self._is_terminal = self._stream is not None and self._stream.isatty()
        if self._is_terminal:
            self._show("\r")

    def update(self, number: int) -> None:
        self._done += number
        if self._is_terminal and time.monotonic() - self._shown >= self._INTERVAL_S:
            self._show("\r")

    def close(self) -> None:
        if self._stream is not None:
            self._show("\n")

    def _show(self, end: str) -> None:
        self._shown = time.monotonic()
        seconds = self._shown - self._start
        share = self._done / self._total if self._total else 1.0
        bar = "#" * int(share * self._WIDTH)
        rate = f", {self._done / seconds:.2f} prompts/s" if seconds > 0 else ""
        line = f"{self._desc}: {share:4.0%} |{bar:<{self._WIDTH}}| {self._done}/{self._total} [{seconds:.1f} s{rate}]"
        self._stream.write(f"{line}  {end}")
        self._stream.flush()
