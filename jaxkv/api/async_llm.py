"""`AsyncLLM`: many users of one model in one asyncio process. vLLM's names."""

from __future__ import annotations

import asyncio
import atexit
import os
import uuid
import weakref
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Iterable,
    Mapping,
    Sequence,
)
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from jaxkv.api.arguments import check_none
from jaxkv.api.async_pooling import AsyncPoolingCalls
from jaxkv.api.engine_thread import EngineThread, Stream
from jaxkv.api.llm import LLM, Conversation
from jaxkv.api.rendering import rendered, tokens_of
from jaxkv.api.session import AsyncSession, Home, chat_options
from jaxkv.build.engine_args import EngineArgs
from jaxkv.build.vllm_arguments import ABSENT_FROM_ASYNC, absence
from jaxkv.config import RequestOutputKind, SamplingParams, one_or_several
from jaxkv.engine.metrics import Metric
from jaxkv.kv.saved import SavedPages
from jaxkv.lora.request import LoRARequest
from jaxkv.requests.outputs import RequestOutput, new_since
from jaxkv.requests.prompts import Prompt
from jaxkv.structured import StructuredOutputsParams

if TYPE_CHECKING:
    from jaxkv.api.views import PageRecording
    from jaxkv.pictures.markup import Picture

T = TypeVar("T")

OF_VLLM = (
    *("prompt_text", "tokenization_kwargs", "trace_headers", "data_parallel_rank", "session_id"),
    *("kv_hints", "reasoning_ended", "reasoning_parser_kwargs"),
)
"""Arguments of vLLM's `generate` that set nothing here."""


class AsyncLLM(AsyncPoolingCalls):
    """Is an `LLM` for asyncio: requests come and go at any time, from any number of tasks and event
    loops.

        async with AsyncLLM("path/to/checkpoint") as llm:
            async for output in llm.generate("def add(a, b):", SamplingParams(max_tokens=64)):
                print(output.outputs[0].text)

    Takes the arguments of `LLM` and raises what that raises. It is made, with loading and
    compiling, in the calling thread; from then on the engine belongs to a thread of its own, so
    that awaiting never blocks an event loop. What changes the engine or draws its pages (`abort`,
    `sleep`, `prefix_tree`, ...) waits for its turn between two steps, which may be long;
    `describe`, `get_metrics` and `check_health` do not wait, nor does it to end an iteration.
    """

    def __init__(self, model: str | os.PathLike[str] | None = None, **options: Any) -> None:
        self._llm = LLM(model, **options)
        if self._llm.is_follower:
            self._llm.shutdown()
            raise ValueError(
                "AsyncLLM: expected the first process of an engine of several, got another one: "
                "LLM(...).follow() is for these"
            )
        self._engine = EngineThread(self._llm)
        # Prompts are made tokens of in a thread of their own, while steps go on. It ends with this
        # object: a call that comes while the engine is shut down is to find it, and the end then.
        self._tokenizing = ThreadPoolExecutor(1, thread_name_prefix="jaxkv-tokenizer")
        # One grammar is tried after the other, each for seconds at worst: in a thread of their own
        # those who wait take none from others, as the event loop's few threads would be.
        self._compiling = ThreadPoolExecutor(1, thread_name_prefix="jaxkv-grammar")
        # Adapters are read one after the other too, but found at once where they are known.
        self._reading = ThreadPoolExecutor(32, thread_name_prefix="jaxkv-adapter")
        # Copying a large vocabulary takes a second, in which programs are compiled.
        self._apart = self._tokenizing.submit(self._llm._intake.apart)
        self._streams: dict[Stream, None] = {}
        """Those that are read, also of requests that the engine has not heard of yet."""
        # Who forgets to call `shutdown` gets the memory back, and a clean exit: the thread must not
        # be in a step when JAX takes its backends down. Python calls what was registered last
        # first, so this is before JAX's own.
        at_exit = self._engine.shutdown
        atexit.register(at_exit)
        self._forget = weakref.finalize(self, _stop_forgotten, self._engine, at_exit)
        self._forget.atexit = False
        self._engine.start()

    @classmethod
    def from_engine_args(cls, args: EngineArgs) -> Self:
        """Makes an engine of `AsyncEngineArgs`. Raises: what `LLM` raises."""
        return cls(**args.keywords())

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(absence("AsyncLLM", name, ABSENT_FROM_ASYNC))

    async def generate(
        self,
        prompt: Prompt | Conversation,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
        **of_vllm: None,
    ) -> AsyncGenerator[RequestOutput]:
        """Yields everything so far (of all samples) whenever there is more; the last output is
        `finished`. With another `output_kind`: what is new, or only the last output.

        Who reads more slowly than tokens come gets fewer outputs, always the newest. Text comes in
        whole characters and never with the beginning of a stop string. Ending the iteration early
        (`aclose`, `break`, a cancelled task) ends the request; after `abort` and `shutdown` the
        last output has the finish_reason "abort".
        prompt: as for `LLM.generate`, or a list of chat messages, or {"messages": [...]} with what
        `LLM.as_completed` takes beside them. sampling_params: by default
        `get_default_sampling_params`. request_id: by default a random one. priority: the lowest
        first. lora_request: an adapter (docs/lora.md). of_vllm: `OF_VLLM`, which may be None.
        Raises, each from this iterator only: ValueError for a prompt or parameter that is refused
        and for a request_id that is in use; what a step of the engine raised that this request was
        in; EngineDeadError.
        """
        if not isinstance(request_id, str | None):
            raise ValueError(
                f"request_id: expected a text or None, got {type(request_id).__name__}"
            )
        for name, value in of_vllm.items():
            if name not in OF_VLLM:
                raise TypeError(f"AsyncLLM.generate: unexpected keyword argument {name!r}")
            check_none(name, value)
        loop = asyncio.get_running_loop()
        stream = Stream(uuid.uuid4().hex if request_id is None else request_id)
        self._streams[stream] = None  # before anything that takes long, where an abort may come
        try:
            held = [await self._compile_grammar(sampling_params)]
            held += await self._read_adapters(lora_request)
            prompt = await self._apart_from_engine(rendered, prompt)
            await self._engine.ask(
                partial(
                    self._engine.add, stream, loop, prompt, sampling_params, priority, lora_request
                )
            )
            held.clear()  # the request has it now
            params = SamplingParams() if sampling_params is None else sampling_params
            kind, before = params.output_kind, None
            while not stream.is_ended:
                output = await stream.get()
                if kind is RequestOutputKind.DELTA:
                    yield new_since(output, before)
                    before = output
                elif kind is RequestOutputKind.CUMULATIVE or output.finished:
                    yield output
        finally:
            del self._streams[stream]
            if not stream.is_ended:
                self._engine.post(partial(self._engine.close, stream))

    async def _compile_grammar(self, params: SamplingParams | None) -> Any:
        """Has a grammar compiled while steps go on, where the engine finds it as long as what is
        returned is held. Raises: ValueError.
        """
        asked = params.structured_outputs if isinstance(params, SamplingParams) else None
        if not isinstance(asked, StructuredOutputsParams):
            return None
        grammars = await self._engine.ask(self._llm._intake.grammars)
        is_known = await asyncio.to_thread(grammars.knows, asked)
        apart = None if is_known else self._compiling
        return await asyncio.get_running_loop().run_in_executor(apart, grammars.compile, asked)

    async def _apart_from_engine(self, function: Callable[..., T], *args: Any) -> T:
        """Calls a function with what makes tokens of prompts while steps go on, calls one after the
        other. Raises: EngineDeadError, and what the function raises.
        """
        self._engine.check()
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._tokenizing, lambda: function(self._apart.result(), *args)
        )

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Reads an adapter into host memory ahead of the requests that name it, and returns True.
        Nothing needs this; who does it hears at once of files that are broken. Raises: ValueError.
        """
        held = await self._read_adapters(lora_request)
        if self._llm.is_led:
            await self._engine.ask(partial(self._llm._intake.agreed_adapter_of, lora_request))
        return bool(held)

    async def render(self, prompt: Prompt | Conversation) -> dict[str, Any]:
        """Returns {"prompt": its text or None, "prompt_token_ids": [...], "cache_salt": ...} of a
        prompt that `generate` takes, to look at or to generate from.

        Raises: ValueError for what `generate` would refuse.
        """
        return await self._apart_from_engine(rendered, prompt)

    async def tokens_of(
        self, prompt: Prompt | Conversation, *, add_special_tokens: bool = True
    ) -> list[int]:
        """Returns the tokens of a prompt or conversation to count them: it may be empty, or longer
        than the context has room for. add_special_tokens: to a text.

        Raises: ValueError for what is no prompt, and for very many characters or tokens.
        """
        count = partial(tokens_of, add_special_tokens=add_special_tokens)
        return await self._apart_from_engine(count, prompt)

    async def session(
        self,
        prompt: Prompt | Conversation,
        *,
        tools: list[dict[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        lora_request: LoRARequest | None = None,
    ) -> AsyncSession:
        """Does what `LLM.session` does."""
        chat = chat_options(tools, chat_template, chat_template_kwargs)
        held = await self._read_adapters(lora_request)
        home = await self._home(chat, lora_request)
        session = await self._apart_from_engine(lambda _: AsyncSession.begin(home, prompt))
        await session.computed()
        held.clear()
        return session

    async def restore(
        self,
        path: str | os.PathLike[str],
        *,
        convert: bool = False,
        lora_request: LoRARequest | None = None,
    ) -> AsyncSession:
        """Does what `LLM.restore` does; other requests wait while its pages are written to the
        device, not while the file is read.
        """
        held = await self._read_adapters(lora_request)
        home, where = await self._home({}, lora_request), Path(path).absolute()
        saved = await asyncio.to_thread(SavedPages.load, where)
        restored = partial(AsyncSession.restored, home, where, saved, convert=convert)
        session = await self._engine.ask(restored)
        held.clear()
        return session

    async def _home(self, chat: Mapping[str, Any], lora_request: LoRARequest | None) -> Home:
        """Does what `LLM._home` does, with what makes tokens of prompts while steps go on."""
        intake = await self._apart_from_engine(lambda intake: intake)
        return replace(self._llm._home(self, chat, lora_request), intake=intake)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Ends a request, or several, and returns when all that it held is free; an unknown id is
        no error. Raises: ValueError for what can be none.
        """
        ids = {*one_or_several("request_id", request_id, str)}
        for stream in list(self._streams):
            stream.is_aborted = stream.is_aborted or stream.id in ids
        await self._engine.ask(partial(self._engine.abort, ids))

    async def get_tokenizer(self) -> Any:
        """Returns a copy of the Hugging Face tokenizer, the same one each time (None with
        skip_tokenizer_init=True).

        A copy, because a tokenizer is for one thread at a time and the engine's thread uses its
        own.
        """
        return await self._engine.ask(self._engine.copied_tokenizer)

    async def check_health(self) -> None:
        """Returns at once while the engine runs. Raises: EngineDeadError, and TimeoutError while a
        step has not ended for five minutes.
        """
        self._engine.check()
        self._engine.check_step()

    async def get_metrics(self, prefix: str = "jaxkv:") -> list[Metric]:
        """Returns what `LLM.get_metrics` does, at once: a step that is stuck is what an operator
        looks for.
        """
        self._engine.check()
        return self._llm.get_metrics(prefix)

    async def wait_until_compiled(self) -> None:
        """Waits as `LLM.wait_until_compiled` does; requests run meanwhile, but with an engine of
        several processes.
        """
        await asyncio.to_thread(self._llm.wait_until_compiled)

    async def describe(self) -> str:
        """Describes the engine as `LLM.describe` does, at once, as `get_metrics` answers."""
        self._engine.check()
        return self._llm.describe()

    @asynccontextmanager
    async def record_pages(self) -> AsyncIterator[PageRecording]:
        """Records what `LLM.record_pages` does: `async with llm.record_pages() as pages:`."""
        recording = self._llm.record_pages()
        try:
            await self._engine.ask(recording.__enter__)
            yield recording
        finally:
            # Not awaited, which could be cancelled: another step or two may still be noted.
            self._engine.post(recording.stop)

    async def prefix_tree(self) -> Picture:
        """Draws what `LLM.prefix_tree` does."""
        return await self._engine.ask(self._llm.prefix_tree)

    async def reset_prefix_cache(self) -> bool:
        """Empties the prefix cache as `LLM.reset_prefix_cache` does."""
        return await self._engine.ask(self._llm.reset_prefix_cache)

    async def update_weights(self, weights: str | os.PathLike[str] | Mapping[str, Any]) -> None:
        """Does what `LLM.update_weights` does; requests run while the new weights are loaded, but
        with an engine of several processes.
        """
        if self._llm.is_led:
            await self._engine.ask(partial(self._llm.update_weights, weights))
            return
        models = await asyncio.to_thread(self._llm._loaded_from, weights)
        await self._engine.ask(partial(self._llm._take, models))

    async def sleep(self, level: int = 1) -> None:
        """Does what `LLM.sleep` does."""
        await self._engine.ask(partial(self._llm.sleep, level))

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Does what `LLM.wake_up` does."""
        await self._engine.ask(partial(self._llm.wake_up, tags))

    async def is_sleeping(self) -> bool:
        """Answers as `LLM.is_sleeping` does."""
        return await self._engine.ask(lambda: self._llm.is_sleeping)

    def get_default_sampling_params(self) -> SamplingParams:
        """Answers as `LLM.get_default_sampling_params` does."""
        return self._llm.get_default_sampling_params()

    @property
    def max_model_len(self) -> int:
        """Returns the longest prompt and output together, in tokens."""
        return self._llm.max_model_len

    @property
    def num_kv_tokens(self) -> int:
        """Counts the tokens that the KV cache holds."""
        return self._llm.num_kv_tokens

    def shutdown(self) -> None:
        """Does what `LLM.shutdown` does, and ends the thread; returns when the step that runs is
        over. Once is enough, twice is fine.
        """
        self._forget()
        self._engine.shutdown()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.shutdown)


def _stop_forgotten(engine: EngineThread, at_exit: Callable[[], None]) -> None:
    # Called by the garbage collector in any thread, maybe the engine's own: so nothing here may
    # wait.
    engine.stop()
    atexit.unregister(at_exit)
