"""Reads the bodies of requests for embeddings (OpenAI's), scores and rankings (vLLM's), and writes
their answers.
"""

from __future__ import annotations

import base64
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from jaxkv.api.openai_format import BodyError, Keys, key_of, prompts_of
from jaxkv.lora.request import LoRARequest
from jaxkv.requests.pooling import EmbeddingRequestOutput, PoolingParams, ScoringRequestOutput

if TYPE_CHECKING:
    from jaxkv.api.async_llm import AsyncLLM

EMBEDDINGS, SCORE, RERANK = "/v1/embeddings", "/v1/score", "/v1/rerank"
ALIASES = {"/score": SCORE, "/rerank": RERANK, "/v2/rerank": RERANK}
"""vLLM's other paths of the same."""

FORMATS = ("float", "base64")

A = TypeVar("A", bound="AskedPooling")


@dataclass(frozen=True, kw_only=True, slots=True)
class AskedPooling(ABC):
    """Holds what a body asks for. `keys`: all of the body; `of_inputs`: the one with the texts."""

    keys: Collection[str]
    model: str | None
    params: PoolingParams
    of_inputs: str

    @property
    @abstractmethod
    def num_sequences(self) -> int:
        """Returns how many prompts are computed, at most."""

    @abstractmethod
    async def answer(
        self, llm: AsyncLLM, model: str, lora: LoRARequest | None
    ) -> Callable[[], dict[str, Any]]:
        """Computes what is asked for. Returns what writes the body of the answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AskedVectors(AskedPooling):
    """Holds what a body for embeddings asks for. `is_base64`: vectors are written as bytes of
    float32.
    """

    inputs: list[dict[str, Any]]
    is_base64: bool

    @property
    def num_sequences(self) -> int:
        return len(self.inputs)

    async def answer(
        self, llm: AsyncLLM, model: str, lora: LoRARequest | None
    ) -> Callable[[], dict[str, Any]]:
        outputs = await llm.embed(self.inputs, pooling_params=self.params, lora_request=lora)
        return lambda: Vectors(model, self.is_base64).whole(outputs)


@dataclass(frozen=True, kw_only=True, slots=True)
class AskedScores(AskedPooling):
    """Holds what a body for scores asks for: of each pair, or one text's with each of several."""

    first: list[str]
    second: list[str]

    @property
    def num_sequences(self) -> int:
        return len(self.first) + len(self.second)

    async def answer(
        self, llm: AsyncLLM, model: str, lora: LoRARequest | None
    ) -> Callable[[], dict[str, Any]]:
        outputs = await llm.score(
            self.first, self.second, pooling_params=self.params, lora_request=lora
        )
        return lambda: self.whole(outputs, model)

    def whole(self, outputs: Sequence[ScoringRequestOutput], model: str) -> dict[str, Any]:
        """Returns the body of the answer; outputs: of each pair."""
        return {
            "id": f"score-{uuid.uuid4().hex}",
            "object": "list",
            "created": int(time.time()),
            "model": model,
            "data": [
                {"index": index, "object": "score", "score": output.outputs.score}
                for index, output in enumerate(outputs)
            ],
            "usage": _usage(outputs),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class AskedRanking(AskedScores):
    """Holds what a body for a ranking asks for. `most`: results, the best ones, None for all."""

    most: int | None
    returns_documents: bool

    def whole(self, outputs: Sequence[ScoringRequestOutput], model: str) -> dict[str, Any]:
        """Returns the body of the answer, the best document first; outputs: of each document."""
        order = sorted(range(len(outputs)), key=lambda index: -outputs[index].outputs.score)
        results = [
            {
                "index": index,
                **({"document": {"text": self.second[index]}} if self.returns_documents else {}),
                "relevance_score": outputs[index].outputs.score,
            }
            for index in order[: self.most]
        ]
        head = {"id": f"rerank-{uuid.uuid4().hex}", "model": model}
        return {**head, "usage": _usage(outputs), "results": results}


def read_vectors(body: Mapping[str, Any]) -> AskedVectors:
    """Reads the body of a request to EMBEDDINGS. Raises: BodyError."""
    return _read(body, _read_vectors)


def read_pooling(url: str, body: Mapping[str, Any]) -> AskedPooling:
    """Reads the body of a request to one of `POOLING`. Raises: BodyError."""
    return _read(body, POOLING[url])


def _read(body: Mapping[str, Any], read: Callable[[Keys], A]) -> A:
    keys = Keys(body)
    try:
        asked = read(keys)
    except BodyError:
        raise
    except ValueError as error:
        raise BodyError(str(error), key_of(error, body.keys())) from error
    keys.end()
    return asked


def _read_vectors(keys: Keys) -> AskedVectors:
    """Reads OpenAI's request for the vectors of a text, of token ids, or of several."""
    inputs = prompts_of(keys.take_any("input"), "input")
    form = keys.take("encoding_format", str, "float")
    if form not in FORMATS:
        raise BodyError(
            f"encoding_format: expected one of {', '.join(FORMATS)}, got {form!r:.80}",
            "encoding_format",
        )
    params = PoolingParams(dimensions=keys.take("dimensions", int), **_cut(keys))
    return AskedVectors(
        inputs=inputs, is_base64=form == "base64", params=params, of_inputs="input", **_of(keys)
    )


def _read_scores(keys: Keys) -> AskedScores:
    """Reads vLLM's request for the scores of text_1 (one, or as many) with each of text_2."""
    first, second = _texts(keys, "text_1"), _texts(keys, "text_2")
    if len(first) not in (1, len(second)):
        raise BodyError(
            f"text_1: expected one text or {len(second)}, as text_2 has, got {len(first)}", "text_1"
        )
    params = PoolingParams(**_cut(keys))
    return AskedScores(first=first, second=second, params=params, of_inputs="text_2", **_of(keys))


def _read_ranking(keys: Keys) -> AskedRanking:
    """Reads vLLM's request for documents in the order in which they fit a query; top_n 0 is all."""
    query, documents = keys.take("query", str), _texts(keys, "documents")
    if not query:
        raise BodyError("query: expected a text, got none", "query")
    return AskedRanking(
        first=[query],
        second=documents,
        most=keys.take_count("top_n") or None,
        returns_documents=keys.take("return_documents", bool, True),
        params=PoolingParams(**_cut(keys)),
        of_inputs="documents",
        **_of(keys),
    )


POOLING: dict[str, Callable[[Keys], AskedPooling]] = {
    EMBEDDINGS: _read_vectors,
    SCORE: _read_scores,
    RERANK: _read_ranking,
}
"""Has what reads the bodies for each path."""


def _cut(keys: Keys) -> dict[str, Any]:
    name = "truncate_prompt_tokens"
    return {name: keys.take(name, int)}


def _of(keys: Keys) -> dict[str, Any]:
    return {"model": keys.take("model", str), "keys": keys.all}


def _texts(keys: Keys, key: str) -> list[str]:
    """Returns one text or several as a list. Raises: BodyError for anything else."""
    given = keys.take_any(key)
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, list) or not texts or not all(isinstance(x, str) for x in texts):
        raise BodyError(f"{key}: expected a text or a list of texts, got {given!r:.80}", key)
    if "" in texts:  # which the engine would count among the prompts of both sides
        raise BodyError(f"{key}: expected texts, got an empty one at {texts.index('')}", key)
    return texts


def _usage(
    outputs: Sequence[EmbeddingRequestOutput] | Sequence[ScoringRequestOutput],
) -> dict[str, int]:
    count = sum(len(output.prompt_token_ids) for output in outputs)
    return {"prompt_tokens": count, "total_tokens": count}


@dataclass(frozen=True, slots=True)
class Vectors:
    """Writes the answer to a request for embeddings."""

    model: str
    is_base64: bool

    def whole(self, outputs: Sequence[EmbeddingRequestOutput]) -> dict[str, Any]:
        """Returns the body of the answer; outputs: of each input."""
        data = [
            {"object": "embedding", "index": index, "embedding": self._written(output)}
            for index, output in enumerate(outputs)
        ]
        return {"object": "list", "data": data, "model": self.model, "usage": _usage(outputs)}

    def _written(self, output: EmbeddingRequestOutput) -> list[float] | str:
        vector = output.outputs.embedding
        if not self.is_base64:
            return vector
        return base64.b64encode(np.asarray(vector, "<f4").tobytes()).decode()
