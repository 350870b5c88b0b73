"""The calls of `AsyncLLM` that want vectors and scores of prompts in place of text."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from jaxkv.api.engine_thread import EngineThread, Stream
from jaxkv.api.llm import LLM
from jaxkv.api.pooling import PoolingCall
from jaxkv.errors import EngineDeadError
from jaxkv.requests.pooling import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingParams,
    PoolingRequestOutput,
    ScoringRequestOutput,
)
from jaxkv.requests.prompts import Prompt

T = TypeVar("T")

Prompts = Prompt | Sequence[Prompt]
Params = PoolingParams | Sequence[PoolingParams] | None


class AsyncPoolingCalls:
    """Adds `embed`, `classify`, `score` and `reward` to an `AsyncLLM`: what `LLM` returns for the
    same arguments, once all prompts of the call are computed. Cancelling the task ends them.

    Raises: what `LLM` raises, and EngineDeadError.
    """

    _llm: LLM
    _engine: EngineThread

    @property
    def pools(self) -> bool:
        """Answers as `LLM.pools` does."""
        return self._llm.pools

    async def embed(
        self,
        prompts: Prompts,
        *,
        truncate_prompt_tokens: int | None = None,
        pooling_params: Params = None,
    ) -> list[EmbeddingRequestOutput]:
        """Returns what `LLM.embed` does."""
        make = self._llm._embed_call
        return await self._pool(partial(make, prompts, pooling_params, truncate_prompt_tokens))

    async def classify(
        self, prompts: Prompts, *, pooling_params: Params = None
    ) -> list[ClassificationRequestOutput]:
        """Returns what `LLM.classify` does."""
        return await self._pool(partial(self._llm._classify_call, prompts, pooling_params))

    async def reward(
        self,
        prompts: Prompts,
        *,
        truncate_prompt_tokens: int | None = None,
        pooling_params: Params = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Returns what `LLM.reward` does."""
        make = self._llm._reward_call
        return await self._pool(partial(make, prompts, pooling_params, truncate_prompt_tokens))

    async def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        /,
        *,
        truncate_prompt_tokens: int | None = None,
        pooling_params: PoolingParams | None = None,
    ) -> list[ScoringRequestOutput]:
        """Returns what `LLM.score` does."""
        make = self._llm._score_call
        return await self._pool(
            partial(make, data_1, data_2, pooling_params, truncate_prompt_tokens)
        )

    async def _pool(self, make_call: Callable[[], PoolingCall[T]]) -> list[T]:
        """Has the call made by the engine's thread, which has the tokenizer, and waits for all of
        its prompts.
        """
        streams: list[Stream] = []
        add = self._engine.add_pooling
        try:
            call, submissions = await self._engine.ask(
                partial(add, streams, asyncio.get_running_loop(), make_call)
            )
            for stream in streams:
                while not stream.is_ended:
                    await stream.get()
        finally:
            # Also those that the thread adds after this: it does what it was told in order.
            self._engine.post(partial(self._engine.close_all, streams))
        if any(one.samples[0].finish_reason == "abort" for one in submissions):
            raise EngineDeadError("the engine was shut down")
        return call.results(submissions)
