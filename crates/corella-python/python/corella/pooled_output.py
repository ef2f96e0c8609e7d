"""Results of models that generate no text: vectors, classes and scores."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PooledRequestOutput:
    """The common part of all results for a prompt."""

    request_id: str
    prompt: str | None
    """The prompt if it was a text."""
    prompt_token_ids: list[int]
    """The tokens of the prompt, without those of the model's own prompt that `prompt_name` writes before it."""

    @property
    def finished(self) -> bool:
        """Always true: these results come as a whole."""
        return True


@dataclass(frozen=True)
class EmbeddingOutput:
    """The vector of a prompt, of length 1 unless `normalize=False`."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """The number of elements of the vector."""
        return len(self.embedding)


@dataclass(frozen=True)
class EmbeddingRequestOutput(PooledRequestOutput):
    """The result of `embed` for a prompt."""

    outputs: EmbeddingOutput


@dataclass(frozen=True)
class ClassificationOutput:
    """The probability of each class, for one prompt."""

    probs: list[float]
    label: str
    """The likeliest class, by its name in the model's config.json."""

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass(frozen=True)
class ClassificationRequestOutput(PooledRequestOutput):
    """The result of `classify` for a prompt."""

    outputs: ClassificationOutput


@dataclass(frozen=True)
class PoolingOutput:
    """The vector of a prompt, or the probabilities of its classes."""

    data: list[float]


@dataclass(frozen=True)
class PoolingRequestOutput(PooledRequestOutput):
    """The result of `encode` for a prompt."""

    outputs: PoolingOutput


@dataclass(frozen=True)
class ScoringOutput:
    """How well two texts fit together."""

    score: float


@dataclass(frozen=True)
class ScoringRequestOutput:
    """The result of `score` for a pair."""

    request_id: str
    outputs: ScoringOutput

    @property
    def finished(self) -> bool:
        """Always true: these results come as a whole."""
        return True
