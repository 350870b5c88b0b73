"""The calls of `LLM` that want vectors and scores of prompts in place of text."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import numpy as np

from jaxkv.api.arguments import IS_BAR, check_none, check_requests, request_of
from jaxkv.build.model import Model
from jaxkv.build.pooling import Pooling, unit
from jaxkv.engine.streams import Front, complete
from jaxkv.lora.request import LoRARequest
from jaxkv.requests.adapters import listed_adapters, one_adapter
from jaxkv.requests.intake import Intake
from jaxkv.requests.pooling import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingParams,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from jaxkv.requests.prompts import Pair, Prompt, listed
from jaxkv.requests.request import Request, Submission

T = TypeVar("T")

Pooled = tuple[Request, np.ndarray]
"""A prompt's request, and what was pooled of its hidden states."""


@dataclass(frozen=True, slots=True)
class PoolingCall(Generic[T]):
    """Says which prompts a call computes, and what its results are made of."""

    prompts: Sequence[Any]
    params: Sequence[PoolingParams]
    make: Callable[[list[Pooled]], list[T]]

    def results(self, submissions: Sequence[Submission]) -> list[T]:
        """Returns what was asked for, of prompts that are computed."""
        return self.make([_pooled_of(submission) for submission in submissions])


class PoolingCalls:
    """Adds `embed`, `classify`, `score` and `reward` to an `LLM`. They need a model that pools:
    `LLM(runner="pooling")`, or a checkpoint that says so; the model then does not generate.

    What the checkpoint says decides how: sentence-transformers' modules.json, a sequence
    classifier's head, and for any other model the state of the last token, made as long as 1.
    Prompts and adapters are as in `generate`, pooling_params one for all or one each, and vLLM's
    other arguments may be None. Results come in input order.
    Raises: ValueError naming every bad index before any work starts, and for a model that
    generates.
    """

    _front: Front
    _intake: Intake
    _model: Model

    @property
    def pools(self) -> bool:
        """Tells whether the model makes vectors and scores in place of text."""
        return self._model.pooling is not None

    def _run(self, submissions: list[Submission], use_tqdm: bool | Callable[..., Any]) -> None:
        raise NotImplementedError

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        tokenization_kwargs: None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Returns a vector for each prompt, as the class's documentation says."""
        check_none("tokenization_kwargs", tokenization_kwargs)
        call = self._embed_call(prompts, pooling_params, truncate_prompt_tokens)
        return self._pooled(call, use_tqdm, lora_request)

    def embed_as_completed(
        self,
        requests: Iterable[
            tuple[Prompt, PoolingParams | None]
            | tuple[Prompt, PoolingParams | None, LoRARequest | None]
        ],
    ) -> Generator[tuple[int, EmbeddingRequestOutput | ValueError]]:
        """Yields (index, result) of every (prompt, parameters) pair, or with an adapter behind
        them, in order of finishing, as `as_completed` does of requests for text.
        """
        self._pooling_of()
        check_requests(requests, "PoolingParams")
        return self._embedded(requests)

    def _embedded(
        self, requests: Iterable[Any]
    ) -> Generator[tuple[int, EmbeddingRequestOutput | ValueError]]:
        asked: dict[int, PoolingParams] = {}

        def arriving() -> Iterator[tuple[int, Submission | ValueError]]:
            for index, given in enumerate(requests):
                try:
                    prompt, params, lora = request_of(given, "PoolingParams")
                    if isinstance(params, list | tuple):
                        raise ValueError("pooling_params: expected one, got several")
                    (own,) = _listed(params, 1, None)
                    self._check_dimensions(own)
                    (submission,) = self._intake.accept_pooling([prompt], [own], [lora])
                except ValueError as error:
                    yield index, ValueError(str(error).removeprefix("prompt 0: "))
                    continue
                asked[index] = own
                yield index, submission

        with closing(complete(self._front, arriving())) as completed:
            for index, result in completed:
                if isinstance(result, ValueError):
                    yield index, result
                else:
                    yield index, self._embedding(*_pooled_of(result), asked.pop(index))

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        tokenization_kwargs: None = None,
    ) -> list[ClassificationRequestOutput]:
        """Returns a probability for each label of a classifier, for each prompt."""
        check_none("tokenization_kwargs", tokenization_kwargs)
        return self._pooled(self._classify_call(prompts, pooling_params), use_tqdm, lora_request)

    def reward(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        tokenization_kwargs: None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Returns a classifier's scores of each prompt as its head gives them, before sigmoid or
        softmax: of the whole prompt, not of each of its tokens.
        """
        check_none("tokenization_kwargs", tokenization_kwargs)
        call = self._reward_call(prompts, pooling_params, truncate_prompt_tokens)
        return self._pooled(call, use_tqdm, lora_request)

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        /,
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        pooling_params: PoolingParams | None = None,
        lora_request: LoRARequest | None = None,
    ) -> list[ScoringRequestOutput]:
        """Returns how well texts fit together: one with each of several, or pair by pair. A
        classifier with one label reads each pair as one prompt, as its tokenizer joins them; of a
        model of vectors it is the cosine between the two.
        """
        call = self._score_call(data_1, data_2, pooling_params, truncate_prompt_tokens)
        return self._pooled(call, use_tqdm, one_adapter(lora_request))

    def _embed_call(
        self, prompts: Any, params: Any, most: int | None = None
    ) -> PoolingCall[EmbeddingRequestOutput]:
        given, own = _asked(prompts, params, most)
        for one in own:
            self._check_dimensions(one)

        def make(pooled: list[Pooled]) -> list[EmbeddingRequestOutput]:
            return [self._embedding(*done, one) for done, one in zip(pooled, own, strict=True)]

        return PoolingCall(given, own, make)

    def _classify_call(self, prompts: Any, params: Any) -> PoolingCall[ClassificationRequestOutput]:
        given, own = _asked(prompts, params)

        def make(pooled: list[Pooled]) -> list[ClassificationRequestOutput]:
            return [
                ClassificationRequestOutput(*_head_of(one, ClassificationOutput(scores.tolist())))
                for one, scores in self._scored(pooled, own)
            ]

        self._check_labels()
        return PoolingCall(given, own, make)

    def _reward_call(
        self, prompts: Any, params: Any, most: int | None = None
    ) -> PoolingCall[PoolingRequestOutput[PoolingOutput]]:
        given, own = _asked(prompts, params, most)

        def make(pooled: list[Pooled]) -> list[PoolingRequestOutput[PoolingOutput]]:
            return [
                PoolingRequestOutput(*_head_of(one, PoolingOutput(scores)))
                for one, scores in self._scored(pooled, own, activate=False)
            ]

        self._check_labels()
        return PoolingCall(given, own, make)

    def _score_call(
        self, data_1: Any, data_2: Any, params: PoolingParams | None, most: int | None = None
    ) -> PoolingCall[ScoringRequestOutput]:
        first, second = _texts(data_1), _texts(data_2)
        if len(first) not in (1, len(second)) or not second:
            raise ValueError(
                f"score: expected one text or as many as the other side has, got {len(first)} "
                f"and {len(second)}"
            )
        pooling = self._pooling_of()
        (own,) = _listed(params, 1, most)
        if pooling.labels > 1:
            raise ValueError(f"score: expected a classifier of one label, got {pooling.labels}")
        if not pooling.labels:
            return self._cosine_call(pooling, first, second, own)
        pairs = zip(first * len(second) if len(first) == 1 else first, second, strict=True)
        prompts = [Pair(*pair) for pair in pairs]
        each = [own] * len(prompts)

        def make(pooled: list[Pooled]) -> list[ScoringRequestOutput]:
            return [
                ScoringRequestOutput(*_head_of(one, ScoringOutput(float(scores[0]))))
                for one, scores in self._scored(pooled, each)
            ]

        return PoolingCall(prompts, each, make)

    def _cosine_call(
        self, pooling: Pooling, first: list[str], second: list[str], params: PoolingParams
    ) -> PoolingCall[ScoringRequestOutput]:
        def make(pooled: list[Pooled]) -> list[ScoringRequestOutput]:
            units = [
                (one, unit(pooling.embedding(x, params.dimensions, False))) for one, x in pooled
            ]
            left = units[: len(first)] * (len(second) if len(first) == 1 else 1)
            pairs = zip(left, units[len(first) :], strict=True)
            return [
                ScoringRequestOutput(*_head_of(two, ScoringOutput(float(x @ y)), behind=one))
                for (one, x), (two, y) in pairs
            ]

        both = [*first, *second]
        return PoolingCall(both, [params] * len(both), make)

    def _scored(
        self, pooled: list[Pooled], params: list[PoolingParams], *, activate: bool = True
    ) -> list[Pooled]:
        """Returns each prompt's request with its scores, by default behind sigmoid or softmax."""
        pooling = self._pooling_of()
        return [
            (request, pooling.scores(x, activate=activate and one.activation is not False))
            for (request, x), one in zip(pooled, params, strict=True)
        ]

    def _pooled(
        self, call: PoolingCall[T], use_tqdm: bool | Callable[..., Any], lora_request: Any
    ) -> list[T]:
        """Computes the prompts of a call and returns its results."""
        IS_BAR("use_tqdm", use_tqdm)
        submissions = self._accept_pooling(call, lora_request)
        self._run(submissions, use_tqdm)
        return call.results(submissions)

    def _accept_pooling(self, call: PoolingCall[T], lora_request: Any) -> list[Submission]:
        loras = listed_adapters(lora_request, len(call.prompts))
        return self._intake.accept_pooling(call.prompts, call.params, loras)

    def _check_labels(self) -> None:
        """Raises ValueError for a model without a classifier's head, saying what is missing."""
        pooling = self._pooling_of()
        if not pooling.labels:
            pooling.scores(np.zeros(0), activate=False)

    def _check_dimensions(self, params: PoolingParams) -> None:
        """Raises ValueError for more dimensions than vectors have."""
        size = self._pooling_of().size(self._model.spec.hidden_size)
        if params.dimensions is not None and params.dimensions > size:
            raise ValueError(f"dimensions: expected at most {size}, got {params.dimensions}")

    def _embedding(
        self, request: Request, pooled_D: np.ndarray, params: PoolingParams
    ) -> EmbeddingRequestOutput:
        vector = self._pooling_of().embedding(pooled_D, params.dimensions, params.normalize)
        return EmbeddingRequestOutput(*_head_of(request, EmbeddingOutput(vector.tolist())))

    def _pooling_of(self) -> Pooling:
        """Returns how the model pools. Raises: ValueError for one that generates."""
        pooling = self._model.pooling
        if pooling is None:
            raise ValueError('expected LLM(runner="pooling"), got a model that generates')
        return pooling


def _pooled_of(submission: Submission) -> Pooled:
    """Returns a prompt's request and what was pooled. Raises: RuntimeError if it was ended."""
    (request,) = submission.samples
    if request.output.pooled_D is None or request.finish_reason != "stop":
        raise RuntimeError(f"request {request.id} has ended before it was computed")
    return request, request.output.pooled_D


def _head_of(
    request: Request, output: Any, *, behind: Request | None = None
) -> tuple[str, Any, list[int], int]:
    """Returns the fields of a result, with the tokens of the request `behind` before its own."""
    both = [request] if behind is None else [behind, request]
    tokens = [token for one in both for token in one.tokens.tolist()]
    return request.id, output, tokens, sum(one.record.num_cached for one in both)


def _texts(given: Any) -> list[str]:
    if isinstance(given, str):
        return [given]
    if not isinstance(given, list | tuple) or not all(isinstance(one, str) for one in given):
        raise ValueError(f"score: expected a text or a list of texts, got {type(given).__name__}")
    return list(given)


def _asked(
    prompts: Any, params: Any, most: int | None = None
) -> tuple[list[Any], list[PoolingParams]]:
    """Returns prompts and checked parameters, one each."""
    given = listed(prompts)
    return given, _listed(params, len(given), most)


def _listed(
    params: PoolingParams | Sequence[PoolingParams] | None, count: int, most: int | None
) -> list[PoolingParams]:
    """Returns checked parameters for so many prompts, `most` of whose tokens are taken."""
    given = params if isinstance(params, list | tuple) else [params] * count
    if len(given) != count:
        raise ValueError(f"pooling_params: expected one or {count}, got {len(given)}")
    found = []
    for one in given:
        if not isinstance(one, PoolingParams | None):
            raise ValueError(f"pooling_params: expected PoolingParams, got {type(one).__name__}")
        own = PoolingParams() if one is None else one
        cut = own.truncate_prompt_tokens if most is None else most
        found.append(replace(own, truncate_prompt_tokens=cut))
    return found
