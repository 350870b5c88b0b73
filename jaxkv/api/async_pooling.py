"""The calls of `AsyncLLM` that want vectors and scores of prompts in place of text."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from jaxkv.api.engine_thread import EngineThread, Stream
from jaxkv.api.llm import LLM
from jaxkv.api.pooling import PoolingCall
from jaxkv.errors import EngineDeadError
from jaxkv.lora.request import LoRARequest
from jaxkv.requests.adapters import one_adapter
from jaxkv.requests.intake import Intake
from jaxkv.requests.pooling import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingParams,
    PoolingRequestOutput,
    ScoringRequestOutput,
)
from jaxkv.requests.prompts import Prompt
from jaxkv.weights.adapters import Adapter

T = TypeVar("T")

Prompts = Prompt | Sequence[Prompt]
Params = PoolingParams | Sequence[PoolingParams] | None
Loras = LoRARequest | Sequence[LoRARequest | None] | None


class AsyncPoolingCalls:
    """Adds `embed`, `classify`, `score` and `reward` to an `AsyncLLM`: what `LLM` returns for the
    same arguments, once all prompts of the call are computed. Cancelling the task ends them.

    Raises: what `LLM` raises, and EngineDeadError.
    """

    _llm: LLM
    _engine: EngineThread
    _reading: ThreadPoolExecutor

    async def _apart_from_engine(self, function: Callable[..., T], *args: Any) -> T:
        raise NotImplementedError

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
        lora_request: Loras = None,
    ) -> list[EmbeddingRequestOutput]:
        """Returns what `LLM.embed` does."""
        make = partial(self._llm._embed_call, prompts, pooling_params, truncate_prompt_tokens)
        return await self._pool(make, lora_request)

    async def classify(
        self, prompts: Prompts, *, pooling_params: Params = None, lora_request: Loras = None
    ) -> list[ClassificationRequestOutput]:
        """Returns what `LLM.classify` does."""
        make = partial(self._llm._classify_call, prompts, pooling_params)
        return await self._pool(make, lora_request)

    async def reward(
        self,
        prompts: Prompts,
        *,
        truncate_prompt_tokens: int | None = None,
        pooling_params: Params = None,
        lora_request: Loras = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Returns what `LLM.reward` does."""
        make = partial(self._llm._reward_call, prompts, pooling_params, truncate_prompt_tokens)
        return await self._pool(make, lora_request)

    async def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        /,
        *,
        truncate_prompt_tokens: int | None = None,
        pooling_params: PoolingParams | None = None,
        lora_request: LoRARequest | None = None,
    ) -> list[ScoringRequestOutput]:
        """Returns what `LLM.score` does."""
        make = partial(
            self._llm._score_call, data_1, data_2, pooling_params, truncate_prompt_tokens
        )
        return await self._pool(make, one_adapter(lora_request))

    async def _read_adapters(self, lora_request: Loras) -> list[Adapter]:
        """Has adapters read from their files while the engine goes on, which does not read them
        again while what is returned is held. Raises: ValueError.
        """
        given: Any = lora_request
        several = given if isinstance(given, list | tuple) else [given]
        read, loop = self._llm._intake.adapter_of, asyncio.get_running_loop()
        asked = [one for one in several if one is not None]
        found = [await loop.run_in_executor(self._reading, read, one) for one in asked]
        return [one for one in found if one is not None]

    async def _pool(self, make_call: Callable[[], PoolingCall[T]], lora_request: Loras) -> list[T]:
        """Makes the call, and waits for all of its prompts."""
        streams: list[Stream] = []
        add = self._engine.add_pooling
        held = await self._read_adapters(lora_request)
        call = await self._apart_from_engine(_rendered, make_call)
        try:
            submissions = await self._engine.ask(
                partial(add, streams, asyncio.get_running_loop(), call, lora_request)
            )
            held.clear()
            for stream in streams:
                while not stream.is_ended:
                    await stream.get()
        finally:
            # Also those that the thread adds after this: it does what it was told in order.
            self._engine.post(partial(self._engine.close_all, streams))
        if any(one.samples[0].finish_reason == "abort" for one in submissions):
            raise EngineDeadError("the engine was shut down")
        # Not in the event loop's thread: thousands of vectors take long.
        return await asyncio.to_thread(call.results, submissions)


def _rendered(intake: Intake, make_call: Callable[[], PoolingCall[T]]) -> PoolingCall[T]:
    """Returns the call, of prompts that are tokens. Raises: ValueError."""
    call = make_call()
    return replace(call, prompts=intake.render_pooled(call.prompts, call.params))
