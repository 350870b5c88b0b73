"""`LLM`: what people touch. vLLM's names; a vLLM user changes the import."""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import jax

from jaxkv.api.arguments import (
    CONTENT_FORMAT,
    IS_BAR,
    IS_PREFIX,
    POSITIVE_OR_NONE,
    SLEEP_LEVEL,
    SLEEPING,
    WAKE_TAGS,
    check_none,
    check_requests,
    listed_params,
    listed_priorities,
    request_of,
)
from jaxkv.api.description import describe
from jaxkv.api.part import make_parts, make_replicated
from jaxkv.api.pooling import PoolingCalls
from jaxkv.api.rendering import without_messages
from jaxkv.api.session import Home, Session, chat_options, digest_of
from jaxkv.build.compile_cache import kernel_folder, use_compile_cache
from jaxkv.build.engine_args import EngineArgs
from jaxkv.build.joining import devices_for, join
from jaxkv.build.model import Model, find_model
from jaxkv.build.options import (
    IS_BOOL,
    IS_LIST,
    IS_PATH,
    IS_TEXT_OR_NONE,
    EngineOptions,
    describe_options,
    takes,
)
from jaxkv.build.origin import WeightNames, origin_of
from jaxkv.build.vllm_arguments import ABSENT_FROM_LLM, absence
from jaxkv.config import PREFILL, BeamSearchParams, SamplingParams
from jaxkv.engine.beams import beam_output
from jaxkv.engine.channel import Sender, connect
from jaxkv.engine.handover import Handover
from jaxkv.engine.leader import ADAPTER, ONLY_FIRST, Follower, Leader
from jaxkv.engine.metrics import Metric, Metrics
from jaxkv.engine.replicas import Replicas
from jaxkv.engine.saving import page_form
from jaxkv.engine.streams import Front, complete, stream
from jaxkv.errors import CapacityError, Catch, CheckpointError
from jaxkv.holding.directory import Directory
from jaxkv.holding.prefix import root_key
from jaxkv.kv.saved import Origin, SavedPages, fingerprint
from jaxkv.lora.request import LoRARequest
from jaxkv.ops import native
from jaxkv.ops.attention import check_backend
from jaxkv.processes import of_all
from jaxkv.programs.process import check_process, is_forked
from jaxkv.requests.adapters import AdapterFiles, listed_adapters
from jaxkv.requests.intake import Intake
from jaxkv.requests.outputs import BeamSearchOutput, RequestOutput, RequestOutputs
from jaxkv.requests.prompts import Prompt, listed
from jaxkv.requests.request import Submission

if TYPE_CHECKING:
    from jaxkv.api.views import PageRecording
    from jaxkv.pictures.markup import Picture

Conversation = Sequence[Mapping[str, Any]]
"""A list of {"role": ..., "content": ...} messages."""


LOG = logging.getLogger("jaxkv")

IDENTITY, UPDATE, COMPILE = "identity", "update", "compile"
"""What a leader has its followers do with it beside requests."""


class LLM(PoolingCalls):
    __doc__ = f"""A model ready to generate: loads weights, compiles every step, then allocates the
    KV cache, once. Threads may share one: their requests run in the same steps.

    {describe_options()}

    vLLM's other arguments are taken with values that mean nothing here, and refused with those
    that would (docs/vllm.md).

    Raises: ValueError for an argument out of range or not supported (nothing is ignored),
    CheckpointError for a broken checkpoint, NotImplementedError for a backend that is not built,
    CapacityError for what memory cannot hold, RuntimeError in a process that was forked when JAX
    had started.
    """

    @takes(EngineOptions)
    def __init__(self, options: EngineOptions) -> None:
        check_process()
        check_backend(options.backend)
        join(options)
        devices = devices_for(options)
        self._compile_cache = use_compile_cache(devices[0])
        native.prepare(kernel_folder(devices[0]))
        model = find_model(options)
        if model.pooling is None:
            model.default_params()  # raises for what a file asks for that cannot be
        with ExitStack() as undo:
            # Before anything takes long: it may be somebody else's.
            self._directory = None if options.kv_disk is None else Directory(Path(options.kv_disk))
            if self._directory is not None:
                undo.callback(self._directory.close)
            self._build(options, model, devices)
            undo.pop_all()

    def _build(self, options: EngineOptions, model: Model, devices: Sequence[jax.Device]) -> None:
        """Loads the weights and allocates what the engine needs, or those that there are."""
        self._parts = make_parts(options, model, devices)
        part = self._parts[0]
        self._model, self._blueprint, self._budget = part.model, part.blueprint, part.budget
        self._front: Front
        if options.data_parallel_size > 1:
            self._engines = make_replicated(self._parts)
            self._engine = self._engines[0]
            self._front = Replicas(self._engines)
        else:
            # Each engine has a lock of its own.
            self._engines = [part.make_engine(self._directory) for part in self._parts]
            self._engine, *prefill = self._engines
            self._front = Handover(prefill[0], self._engine) if prefill else self._engine
            end = connect(part.blueprint.placement.devices, options.master_addr)
            if isinstance(end, Sender):
                self._front = Leader(self._engine, end)
            elif end is not None:
                self._front = Follower(self._engine, end)
        self._weight_names = WeightNames()
        self._intake = self._make_intake()

    @classmethod
    def from_engine_args(cls, args: EngineArgs) -> Self:
        """Makes an engine of `EngineArgs`. Raises: what `LLM` raises."""
        return cls(**args.keywords())

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(absence("LLM", name, ABSENT_FROM_LLM))

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: int | Sequence[int] | None = None,
        *,
        prompt_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        tokenization_kwargs: None = None,
        mm_processor_kwargs: None = None,
    ) -> list[RequestOutput]:
        """Completes every prompt; results in input order.

        prompts: a text, token ids, {"prompt": text} or {"prompt_token_ids": [...]}, or a sequence
        or 1-D array of them.
        sampling_params: one for all or one each (default: `get_default_sampling_params`). priority:
        one number for all or per prompt, the lowest first. use_tqdm: whether a bar is shown, or a
        class of bars. lora_request: an adapter for all, or one or None each (docs/lora.md).
        prompt_token_ids: prompts, as older scripts give them.
        Raises: ValueError naming every bad index before any work starts.
        """
        IS_BAR("use_tqdm", use_tqdm)
        check_none("tokenization_kwargs", tokenization_kwargs)
        check_none("mm_processor_kwargs", mm_processor_kwargs)
        if prompt_token_ids is not None:
            if prompts is not None:
                raise ValueError("prompt_token_ids: expected no prompts beside them")
            prompts = prompt_token_ids
        given = listed(prompts)
        params = listed_params(sampling_params, len(given), self.get_default_sampling_params)
        priorities = listed_priorities(priority, len(given))
        loras = listed_adapters(lora_request, len(given))
        submissions = self._intake.accept(given, params, priorities, loras)
        self._run(submissions, use_tqdm)
        return RequestOutputs(submission.output() for submission in submissions)

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: int | Sequence[int] | None = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        tokenization_kwargs: None = None,
        mm_processor_kwargs: None = None,
    ) -> list[RequestOutput]:
        """Completes conversations: a list of {"role": ..., "content": ...} messages, or a list of
        such lists. A content is a text, or a list of texts or {"type": "text", "text": ...} parts.

        The checkpoint's chat template (or `chat_template`) makes the prompts. It gets contents in
        the form that it reads; chat_template_content_format="string" or "openai" (lists of parts)
        says which that is.
        Raises: ValueError if there is no template or it refuses a conversation, and as `generate`
        does.
        """
        if not isinstance(messages, (list, tuple)):
            raise ValueError(
                f"messages: expected a conversation or a list of them, got "
                f"{type(messages).__name__}"
            )
        IS_BAR("use_tqdm", use_tqdm)
        IS_BOOL("add_generation_prompt", add_generation_prompt)
        IS_BOOL("continue_final_message", continue_final_message)
        IS_TEXT_OR_NONE("chat_template", chat_template)
        CONTENT_FORMAT("chat_template_content_format", chat_template_content_format)
        check_none("tokenization_kwargs", tokenization_kwargs)
        check_none("mm_processor_kwargs", mm_processor_kwargs)
        IS_LIST("tools", tools)
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        prompts = self._intake.render(
            conversations,
            chat_template_kwargs,
            chat_template_content_format,
            chat_template=chat_template,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        return self.generate(
            prompts, sampling_params, use_tqdm, lora_request=lora_request, priority=priority
        )

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        use_tqdm: bool | Callable[..., Any] = False,
        concurrency_limit: int | None = None,
        priority: None = None,
    ) -> list[BeamSearchOutput]:
        """Finds the `beam_width` best sequences for every prompt, as transformers' beam search
        finds them; in input order.

        prompts, lora_request: as in `generate`. Each beam takes a row, and gets one token of a
        loop, so where many run, loops of all rows are short. concurrency_limit changes nothing:
        max_num_seqs says how many rows run.
        Raises: ValueError naming every bad index before any work starts.
        """
        POSITIVE_OR_NONE("concurrency_limit", concurrency_limit)
        check_none("priority", priority)
        IS_BAR("use_tqdm", use_tqdm)
        given = listed(prompts)
        loras = listed_adapters(lora_request, len(given))
        submissions = self._intake.accept_searches(given, params, loras)
        self._run(submissions, use_tqdm)
        tokenizer, include = self._model.tokenizer, params.include_stop_str_in_output
        decode = write = None
        if tokenizer is not None:
            decode = tokenizer.decode
            write = partial(decode, skip_special_tokens=params.skip_special_tokens)
        eos_id = self._model.eos_id
        return [
            beam_output(one, eos_id=eos_id, include_stop=include, decode=decode, write=write)
            for one in submissions
        ]

    def as_completed(
        self,
        requests: Iterable[
            tuple[Prompt | Conversation, SamplingParams | None]
            | tuple[Prompt | Conversation, SamplingParams | None, LoRARequest | None]
        ],
    ) -> Generator[tuple[int, RequestOutput | ValueError]]:
        """Yields (index, result) of every request in order of finishing; one that is refused gives
        its ValueError.

        requests: (prompt or list of chat messages, parameters or None for
        `get_default_sampling_params`) pairs, or with an adapter or None behind them; also
        {"messages": [...]} with "tools", "chat_template_kwargs", "add_generation_prompt",
        "continue_final_message" and "cache_salt" beside it, as in `chat`, and "reasoning_effort"
        (`requests.chats.EFFORTS`). They may be endless: at most 2 * max_num_seqs are taken and not
        yet given back. Taking one that is slow to come holds up those that run. Closing the
        iterator ends what is left; finish_reason "abort" is as in a stream.
        Raises: ValueError at the call if `requests` is no iterable, and later what iterating over
        it raises.
        """
        check_requests(requests, "SamplingParams")
        return _outputs(complete(self._front, enumerate(map(self._accept_or_refuse, requests))))

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        lora_request: LoRARequest | None = None,
    ) -> Iterator[RequestOutput]:
        """Yields what is new (text, token_ids, logprobs) as it is generated; the last one carries
        the finish_reason.

        Text comes in whole characters, and never with the beginning of a stop string. Closing the
        iterator ends the request. Raises: ValueError at the call, before anything is yielded.
        """
        params = listed_params(sampling_params, 1, self.get_default_sampling_params)
        (submission,) = self._intake.accept([prompt], params, None, [lora_request])
        return stream(self._front, submission)

    def session(
        self,
        prompt: Prompt | Conversation,
        *,
        tools: list[dict[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        lora_request: LoRARequest | None = None,
    ) -> Session:
        """Computes a prompt, or a list of chat messages, and returns it as a value that can go on
        in many ways.

        The other arguments are for chats, as in `chat`, and an adapter for all that comes of it.
        Raises: ValueError for what is refused, and with enable_prefix_caching=False.
        """
        chat = chat_options(tools, chat_template, chat_template_kwargs)
        home = self._home(self, chat, lora_request)
        session = Session.begin(home, prompt)
        self.generate(session.prompt, PREFILL, use_tqdm=False, lora_request=lora_request)
        return session

    def restore(
        self,
        path: str | os.PathLike[str],
        *,
        convert: bool = False,
        lora_request: LoRARequest | None = None,
    ) -> Session:
        """Returns the session that `Session.save` has written, with its pages in the prefix cache.

        lora_request: the adapter that it was computed with, wherever that is now.
        convert: keys and values of another dtype or kv_cache_dtype, and quantised ones from another
        backend or in pages of another size, are stored anew, which rounds them once more.
        Raises: SavedFileError for a file that is broken or of another model, CapacityError where
        its pages do not fit.
        """
        home, where = self._home(self, {}, lora_request), Path(path).absolute()
        return Session.restored(home, where, SavedPages.load(where), convert=convert)

    def get_default_sampling_params(self) -> SamplingParams:
        """Returns what the model's generation_config.json asks for, vLLM's defaults where it says
        nothing.

        Raises: CheckpointError if it asks for something that is out of range.
        """
        return replace(self._model.default_params(), reasoning=self._blueprint.options.reasoning)

    def wait_until_compiled(self) -> None:
        """Returns when all programs are compiled: nothing compiles after that. For those who
        measure; requests wait for the programs that they need only.

        Raises: CapacityError if the programs do not fit, EngineDeadError where a shutdown comes
        before, and what else compiling one has raised.
        """
        self._front.check_alive()
        if isinstance(self._front, Leader):
            self._front.everywhere(COMPILE, self._compiled_with_others)
            return
        self._check_first("wait_until_compiled")
        self._compile_all()

    def _compile_all(self) -> None:
        for part, engine in zip(self._parts, self._engines, strict=True):
            part.budget.compile_all(engine.programs)

    def _compiled_with_others(self) -> None:
        """Compiles all programs, and waits until every process has."""
        self._compile_all()
        of_all(True)

    def update_weights(self, weights: str | os.PathLike[str] | Mapping[str, Any]) -> None:
        """Computes with other weights of the same model from now on: all of them, or after an
        error none. No program of the engine compiles, the prefix cache and what stands behind it
        are emptied, and requests under way go on from the tokens that they have, computed anew.

        weights: a directory or hub id, or numpy or jax arrays: under a checkpoint's names, nested
        at any dot, or in jaxkv's own tree (`jaxkv.functional.load(...).weights`). They become what
        loading makes of them, on accelerators from device to device. An engine that is awake has
        room for old and new ones at once, or `sleep(level=2)` comes first.
        Raises: CheckpointError for missing, unknown or misshapen tensors, values that are not
        finite and another model's config.json, ValueError for other things, CapacityError.
        """
        if not isinstance(self._front, Leader):
            self._check_first("update_weights")
            self._take(self._loaded_from(weights))
            return
        if isinstance(weights, Mapping):
            raise NotImplementedError(
                "update_weights: expected a directory or hub id, which all processes read, got "
                "arrays"
            )
        IS_PATH("weights", weights)
        where = None if weights is None else os.fspath(weights)
        update = partial(self._updated_with_others, where)
        error = self._front.everywhere(UPDATE, update, where)
        if error is not None:
            raise error

    def sleep(self, level: int = 1) -> None:
        """Gives the device's memory to others until `wake_up`: that of the KV cache, and of the
        weights, which level 1 keeps in host memory and level 2 does not (`update_weights` brings
        others). Requests are refused meanwhile.

        Raises: ValueError with requests under way.
        """
        SLEEP_LEVEL("level", level)
        self._front.sleep(keeps_weights=level == 1)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Takes the memory again that `sleep` gave away, with an empty KV cache. tags: "weights"
        or "kv_cache" for one of them at a time.

        Raises: ValueError after level 2 before `update_weights`.
        """
        WAKE_TAGS("tags", tags)
        self._front.wake_up(SLEEPING if tags is None else tags)

    @property
    def is_sleeping(self) -> bool:
        """Tells whether `sleep` has taken anything that `wake_up` has not brought back."""
        return self._front.is_asleep

    @property
    def is_led(self) -> bool:
        """Tells whether several processes have this engine, and this one takes the requests."""
        return isinstance(self._front, Leader)

    @property
    def is_follower(self) -> bool:
        """Tells whether another process of this engine takes the requests, and this one is to
        `follow` it.
        """
        return isinstance(self._front, Follower)

    def follow(self) -> None:
        """Computes this process's part of what the first process of an engine of several is asked,
        until that one shuts the engine down (docs/usage.md#several-hosts).

        Raises: ValueError in the first process, EngineDeadError where that has gone without a word.
        """
        if not isinstance(self._front, Follower):
            raise ValueError(
                "follow: expected another process than the first of an engine of several, got one "
                "that takes requests itself"
            )
        functions: dict[str, Callable[..., Any]] = {
            IDENTITY: self._own_origin,
            UPDATE: self._updated_with_others,
            COMPILE: self._compiled_with_others,
            ADAPTER: self._read_with_others,
        }
        self._front.follow(self._intake.again, functions)

    def _read_with_others(self, lora: Sequence[Any], digest: str) -> None:
        """Reads an adapter, and says whether it is that of the first process."""
        with Catch() as caught:
            self._intake.same_adapter(lora, digest)
        if caught.error is not None:
            LOG.warning("%s", caught.error)
        of_all(caught.error is not None)

    def _loaded_from(
        self, weights: Any, when_read: Callable[[], None] = lambda: None
    ) -> list[Model]:
        """Returns the models of all parts with these weights, beside those that they have."""
        self._front.check_alive()
        try:
            first, *others = self._parts
            model = first.model.updated(first.blueprint, weights, when_read=when_read)
            if isinstance(self._front, Replicas):
                return [model, *(part.copied(model) for part in others)]
            rest = (part.model.updated(part.blueprint, weights) for part in others)
            return [model, *rest]
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise CapacityError(
                f"no room for the new weights beside the old ones: call sleep(level=2) before "
                f"update_weights, and wake_up after it ({str(error).splitlines()[0]})"
            ) from error

    def _updated_with_others(self, where: str | None) -> Exception | None:
        """Takes the weights if all processes can read them; returns why else not."""
        has_said, have_read = False, False
        elsewhere = CheckpointError(
            f"{where}: expected weights that all processes can read, got an error in another one"
        )

        def agree() -> None:
            nonlocal has_said, have_read
            has_said = True
            if of_all(False).any():
                raise elsewhere
            have_read = True

        models: list[Model] = []
        with Catch() as caught:
            models = self._loaded_from(where, when_read=agree)
        error = caught.error
        # What comes behind the reading may fail in one of them too.
        if (have_read or not has_said) and of_all(error is not None).any():
            error = error or elsewhere
        if error is None:
            self._take(models)
        for array in jax.tree.leaves([one.weights for one in models]) if error else ():
            array.delete()
        return error

    def _take(self, models: Sequence[Model]) -> None:
        """Has the engines compute with the weights of these models."""
        old = [engine.weights for engine in self._engines]
        secret = secrets.token_bytes(32)
        self._front.replace_weights(*(model.weights for model in models), secret=secret)
        self._parts = [
            replace(part, model=model) for part, model in zip(self._parts, models, strict=True)
        ]
        self._model = models[0]
        for array in jax.tree.leaves(old):
            array.delete()

    def shutdown(self) -> None:
        """Ends every request and gives the memory of weights and KV cache back, and a `kv_disk` to
        others; later calls that need the engine raise EngineDeadError. Once is enough, twice is
        fine; the end of a `with LLM(...) as llm` does it. In a fork of the process that made the
        engine it does nothing: all of that is the other one's.
        """
        if is_forked():
            return
        for engine in self._engines:
            engine.programs.stop()
        try:
            self._front.end()
        finally:  # also where a disk fails that pages wait for
            for engine in self._engines:
                held = (engine.weights, engine.draft, engine.adapters, engine.kv)
                for array in jax.tree.leaves(held):
                    array.delete()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    @property
    def max_model_len(self) -> int:
        """Returns the longest prompt and output together, in tokens."""
        return self._blueprint.limits.max_model_len

    @property
    def num_kv_tokens(self) -> int:
        """Counts the tokens that the KV cache holds, of all engines."""
        return self._blueprint.limits.num_tokens * self._num_replicas

    @property
    def _num_replicas(self) -> int:
        return self._blueprint.options.data_parallel_size

    def _check_one(self, what: str) -> None:
        """Raises: ValueError where there are several engines, each with pages of its own."""
        if self._num_replicas > 1:
            raise ValueError(
                f"{what}: expected data_parallel_size 1, since it is about the pages of one "
                f"engine, got {self._num_replicas}"
            )

    def _check_first(self, what: str) -> None:
        """Raises: ValueError where another process is asked."""
        if self.is_follower:
            raise ValueError(f"{what}: {ONLY_FIRST}")

    @property
    def compile_s(self) -> float:
        """Counts the seconds in which something was compiled so far, behind running requests
        too.
        """
        return sum(engine.programs.compile_s for engine in self._engines)

    @property
    def compile_wait_s(self) -> float:
        """Counts the seconds that running requests have waited for compilation so far."""
        return sum(engine.programs.waited_s for engine in self._engines)

    def get_tokenizer(self) -> Any:
        """Returns the Hugging Face tokenizer, None with skip_tokenizer_init=True."""
        return self._model.tokenizer

    @property
    def model_names(self) -> tuple[str, ...]:
        """Returns what the model may be called: as it was given, and the name of its directory."""
        given, directory = self._blueprint.options.model, self._model.directory
        names = () if given is None else (os.fspath(given),)
        return tuple(dict.fromkeys((*names, directory.name)))

    def lora_digest(self, lora_request: LoRARequest) -> str:
        """Returns the SHA-256 of what an adapter computes, which tells it from others whatever
        they are called. Raises: ValueError as `generate` does.
        """
        return digest_of(self._intake.adapter_of(lora_request))

    def identity(self) -> dict[str, Any]:
        """Returns fingerprints of the model and what else its outputs depend on, by which runs of
        unlike engines are told apart. Cost: the device reads the weights, once.
        """
        if isinstance(self._front, Leader):
            with self._front.lock:
                self._engine.check_awake()  # an error on the way would end the engine
                origin = self._front.everywhere(IDENTITY, self._own_origin)
        else:
            self._check_first("identity")
            origin = self._own_origin()
        template = getattr(self._model.tokenizer, "chat_template", None)
        limits, options = self._blueprint.limits, self._blueprint.options
        pooling = self._model.pooling
        return {
            **{name: getattr(origin, name) for name in ("model", "weights", "tokenizer", "dtype")},
            "chat_template": fingerprint([repr(template).encode()]),
            "kv_cache_dtype": origin.codec,
            "kv_policy": [options.kv_policy, options.kv_budget],
            "max_model_len": limits.max_model_len,
            **({} if pooling is None else {"pooling": f"{pooling.kind} {pooling.normalizes}"}),
        }

    def page_table(self) -> dict[str, tuple[int, ...]]:
        """Returns the page ids that every running request holds now, by request_id: a copy, to look
        at.

        A request's i-th page is for its tokens from i * block_size on, but for what a kv_policy or
        a sliding window has let go. Where layers have unlike windows, the pages of one page table
        come after those of another.
        Pages taken for its next tokens are listed too; what waits holds none, and neither that nor
        what needs no more steps is listed. Raises: ValueError with several engines.
        """
        self._check_one("page_table")
        with self._engine.lock:
            running = self._engine.scheduler.running
            return {
                request.id: tuple(page for part in request.hold.parts for page in part.pages)
                for request in running
            }

    def record_pages(self) -> PageRecording:
        """Records who holds which pages after each step: `with llm.record_pages() as pages:`, and
        `pages.picture()` draws them. Costs nothing outside of that block.
        """
        from jaxkv.api.views import PageRecording

        self._check_one("record_pages")
        return PageRecording(self._engine)

    def prefix_tree(self) -> Picture:
        """Draws what the prefix cache keeps and who holds it, as a tree with its texts, of whoever
        has sent them.
        """
        from jaxkv.api.views import prefix_picture

        self._check_one("prefix_tree")
        return prefix_picture(self._engine, self._intake)

    def _repr_html_(self) -> str:
        from jaxkv.api.views import engine_html

        return engine_html(self.describe(), self._engine, self._budget)

    def reset_prefix_cache(self) -> bool:
        """Empties the prefix cache: nothing computed so far is used for requests that come from now
        on. Returns True, as vLLM does where it could.
        """
        self._front.forget()
        return True

    def get_metrics(self, prefix: str = "jaxkv:") -> list[Metric]:
        """Returns counters, gauges and histograms under vLLM's names (and some of our own), behind
        `prefix`: "vllm:" makes them fit what is built for vLLM. `prometheus_text` writes them as
        Prometheus reads them. Another thread may ask too, and waits for no step: then figures may
        be from some lines of it apart. Raises: ValueError for a prefix that is no text.
        """
        IS_PREFIX("prefix", prefix)
        check_process()
        metrics = self._front.metrics()
        return Metrics(replace(metric, name=prefix + metric.name) for metric in metrics)

    def describe(self) -> str:
        """Describes what this engine is and has: model, memory, programs, backend and why."""
        what = "replica" if self._num_replicas > 1 else "prompts"
        others = [f"{what}   on {part.blueprint.placement}" for part in self._parts[1:]]
        lines = describe(
            self._model, self._blueprint, self._engine, self._budget, self._compile_cache
        )
        return "\n".join([lines, *others])

    def _home(self, owner: Any, chat: Mapping[str, Any], lora_request: LoRARequest | None) -> Home:
        """Returns what sessions of `owner`, which this engine serves, have in common. Raises:
        ValueError with several engines.
        """
        self._check_one("session")
        return Home(owner, self._intake, self._engine, self._origin_alone, chat, lora_request)

    def _origin_alone(self, form: str) -> Origin:
        if isinstance(self._front, Leader | Follower):
            raise NotImplementedError(
                "save, restore: expected an engine of one process, got one of several: save the "
                "tokens"
            )
        return self._origin(form)

    def _own_origin(self) -> Origin:
        return self._origin(form="")

    def _origin(self, form: str) -> Origin:
        """Says what the engine's keys and values are of. Raises: ValueError while it sleeps."""
        self._engine.check_awake()
        return origin_of(
            self._model, self._engine.weights, self._blueprint, form, self._weight_names
        )

    def _make_intake(self) -> Intake:
        blueprint = self._blueprint
        secret = blueprint.options.prefix_cache_secret
        # Which weights is not asked: the cache ends with the engine, which has only one model.
        depends_on = [repr(blueprint.spec), blueprint.dtype, repr(blueprint.codecs)]
        if self._directory is not None:
            secret = self._directory.secret if secret is None else secret
            origin = self._origin(page_form(self._engine.kv))
            depends_on = [repr(replace(origin, tokenizer=""))]  # pages are of token ids
            if self._model.draft is not None and blueprint.draft is not None:
                draft, names = self._model.draft, WeightNames()
                own = origin_of(draft, draft.weights, blueprint.draft, "", names)
                depends_on.append(repr((own, blueprint.draft.layout.hidden_states)))
        root = root_key(secrets.token_bytes(32) if secret is None else secret, *depends_on)
        engine, front = self._engine, self._front
        return Intake(
            self._model,
            blueprint.limits,
            cache_root=lambda: engine.secret or root,
            share_prefixes=blueprint.options.enable_prefix_caching,
            lock=engine.lock,
            adapters=AdapterFiles(blueprint),
            agree=front.agree_on if isinstance(front, Leader) else None,
            reasoning=blueprint.options.reasoning,
        )

    def _accept_or_refuse(self, asked: Any, priority: int = 0) -> Submission | ValueError:
        try:
            prompt, params, lora_request = request_of(asked, "SamplingParams")
            prompt = without_messages(self._intake, prompt)
            chosen = self.get_default_sampling_params() if params is None else params
            (submission,) = self._intake.accept([prompt], [chosen], [priority], [lora_request])
        except ValueError as error:
            # Its index in a list of one says nothing here.
            return ValueError(str(error).removeprefix("prompt 0: "))
        return submission

    def _run(self, submissions: list[Submission], use_tqdm: bool | Callable[..., Any]) -> None:
        """Returns when all of these have finished."""
        from tqdm import tqdm

        make_bar = tqdm if isinstance(use_tqdm, bool) else use_tqdm
        started, num_tokens = time.monotonic(), 0
        with (
            make_bar(total=len(submissions), desc="Processed prompts", disable=not use_tqdm) as bar,
            closing(complete(self._front, enumerate(submissions))) as completed,
        ):
            for _, submission in completed:
                if isinstance(submission, Submission):
                    num_tokens += sum(one.num_new for one in submission.samples)
                if num_tokens:  # an attribute, as vLLM sets it: other classes may have no method
                    bar.postfix = f"{num_tokens / (time.monotonic() - started):.1f} tokens/s"
                bar.update()


def _outputs(
    completed: Generator[tuple[int, Submission | ValueError]],
) -> Generator[tuple[int, RequestOutput | ValueError]]:
    """Yields the output of each submission that has finished."""
    with closing(completed):
        for index, one in completed:
            yield index, one if isinstance(one, ValueError) else one.output()
