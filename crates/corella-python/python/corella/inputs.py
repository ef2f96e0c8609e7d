"""Prompts, by the name of vLLM's module."""

from collections.abc import Sequence
from typing import TypedDict

from corella.request import Prompt as PromptType


class TextPrompt(TypedDict):
    """A text as a prompt.

    >>> TextPrompt(prompt="Once upon a time")
    {'prompt': 'Once upon a time'}
    """

    prompt: str


class TokensPrompt(TypedDict):
    """Token ids as a prompt."""

    prompt_token_ids: Sequence[int]


__all__ = ["PromptType", "TextPrompt", "TokensPrompt"]
