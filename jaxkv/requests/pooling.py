"""Defines what callers ask for and get who want vectors and scores, under vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from jaxkv.config import is_int, take_over

T = TypeVar("T")


@dataclass(kw_only=True, slots=True)
class PoolingParams:
    """Says what is made of a prompt's hidden states: vLLM's field names.

    truncate_prompt_tokens: at most so many tokens of the prompt, -1 for as many as the model takes;
    a text is cut as the tokenizer cuts it, token ids at their end. None: a longer one is refused.
    dimensions: the first numbers of an embedding only. normalize: its length is 1; None is what the
    checkpoint says. activation: False for scores before sigmoid or softmax.
    Raises: ValueError naming the field for a value out of range.
    """

    truncate_prompt_tokens: int | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    activation: bool | None = None

    def __post_init__(self) -> None:
        take_over(self)
        for name, least in (("truncate_prompt_tokens", -1), ("dimensions", 1)):
            value = getattr(self, name)
            if value is not None and not (is_int(value) and value >= least and value != 0):
                also = "-1 or " if least < 0 else ""
                raise ValueError(f"{name}: expected None, {also}a number >= 1, got {value!r}")
        for name in ("normalize", "activation"):
            if not isinstance(getattr(self, name), bool | None):
                raise ValueError(
                    f"{name}: expected None, True or False, got {getattr(self, name)!r}"
                )


@dataclass(slots=True)
class PoolingOutput:
    """Holds a prompt's raw scores, one for each label, as float32."""

    data: np.ndarray


@dataclass(slots=True)
class EmbeddingOutput:
    """Holds a prompt's vector."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(slots=True)
class ClassificationOutput:
    """Holds a probability for each label."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass(slots=True)
class ScoringOutput:
    """Says how well a pair fits together."""

    score: float


@dataclass(slots=True)
class PoolingRequestOutput(Generic[T]):
    """Holds what came of one prompt: `outputs` is one of the classes above."""

    request_id: str
    outputs: T
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True


class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput]):
    """Is what `LLM.embed` gives for each prompt."""


class ClassificationRequestOutput(PoolingRequestOutput[ClassificationOutput]):
    """Is what `LLM.classify` gives for each prompt."""


class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput]):
    """Is what `LLM.score` gives for each pair."""
