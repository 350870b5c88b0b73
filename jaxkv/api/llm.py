"""`LLM`: what people touch. vLLM's names; a vLLM user changes the import."""

from __future__ import annotations

import os
import secrets
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax

from jaxkv.build.codecs import describe_codecs, group_codecs
from jaxkv.build.compile_cache import use_compile_cache
from jaxkv.build.memory import device_memory
from jaxkv.build.model import find_model
from jaxkv.build.pool import (
    Codecs,
    abstract_kv,
    bytes_with_low,
    empty_kv,
    fits_keys,
    plan_pool,
    with_policy,
)
from jaxkv.config import BeamSearchParams, EngineConfig, SamplingParams, check_others, engine_limits
from jaxkv.engine.beams import beam_output
from jaxkv.engine.engine import Engine
from jaxkv.engine.metrics import Metric
from jaxkv.engine.streams import complete, stream
from jaxkv.holding.prefix import root_key
from jaxkv.kv.policies import asks_backend, get_policy
from jaxkv.models.decoder import heads_of
from jaxkv.ops.attention import Needs, check_backend, choose_backend
from jaxkv.programs.compiled import Programs
from jaxkv.requests.intake import Intake, Prompt
from jaxkv.requests.outputs import BeamSearchOutput, RequestOutput
from jaxkv.requests.request import Submission

DEMO = Path(__file__).parents[1] / "demo"

Conversation = Sequence[Mapping[str, Any]]
"""A list of {"role": ..., "content": ...} messages."""


class LLM:
    """A model ready to generate: loads weights, compiles every step, then allocates the KV cache,
    once.

    model: a local Hugging Face directory, a hub id, or None for the small demo model that ships
    with jaxkv.
    tokenizer: directory or hub id of the tokenizer (default: the model's); skip_tokenizer_init=True
    works without one.
    dtype: auto, bfloat16 or float32; auto is bfloat16 unless this CPU has no instructions for it,
    and in a directory made by `jaxkv convert` what that stores. load_format: auto, or dummy for
    random weights of a model whose config.json is all there is, to measure its speed and memory.
    max_model_len: longest prompt and output together, in tokens (default: what the checkpoint
    declares).
    max_num_seqs: rows that run at once (default 64 on a CPU, 256 elsewhere).
    max_num_batched_tokens: tokens per step.
    block_size: tokens per page, 8 to 128 (default 16 on a CPU, 64 elsewhere).
    kv_cache_dtype: auto (as dtype), bfloat16 or float32, or smaller (docs/kv-codecs.md): int8,
    fp8_e4m3, fp8_e5m2, int4, turboquant4, turboquant3, turboquant2.5. kv_cache_dtype_skip_layers:
    layers that stay in dtype all the same, by number (-1 is the last), or "sliding_window" for all
    that have one.
    kv_policy, kv_budget: what stays of a request's cache when it takes so many tokens' bytes
    (docs/kv-policies.md): full (everything), streaming, page_norm, h2o_page, snapkv_page, entropy;
    "streaming:int8" first demotes to int8. With quest everything stays, and the budget is what a
    new token reads.
    kv_cache_memory_bytes, num_gpu_blocks_override: size of the cache in bytes or pages; by default
    what max_num_seqs rows of max_model_len take, within gpu_memory_utilization of the device (on a
    CPU of the available memory, and at most a quarter of it).
    enable_prefix_caching: full pages of prompts and outputs stay in the cache until their room is
    needed, and requests that begin with the same tokens take them over. prefix_cache_secret: what
    the keys of cached pages are derived from, by default random for each engine.
    deterministic: on a CPU, the same tokens and logprobs to the last bit, however a prompt was cut,
    cached or preempted (default: whatever runs beside it; what it costs is in
    docs/architecture.md).
    seed: of requests that bring none. lazy_compile: compile each step on first use instead of all
    at once.
    max_logprobs: the most that a request may ask for; steps have room for as many per token (-1:
    the vocabulary).
    tensor_parallel_size: devices that divide the model and its KV cache between them by heads.

    Other names of vLLM's are taken with the one value that is true here (`config.ONLY`).

    Raises: ValueError for an argument out of range or not supported (nothing is ignored),
    CheckpointError for a broken checkpoint, NotImplementedError for a backend that is not built,
    CapacityError for what memory cannot hold.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        tokenizer: str | os.PathLike[str] | None = None,
        skip_tokenizer_init: bool = False,
        revision: str | None = None,
        dtype: str = "auto",
        load_format: str = "auto",
        tensor_parallel_size: int = 1,
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int = 2048,
        block_size: int | None = None,
        backend: str = "auto",
        kv_cache_dtype: str = "auto",
        kv_cache_dtype_skip_layers: Sequence[int | str] | None = None,
        kv_policy: str = "full",
        kv_budget: int | None = None,
        kv_cache_memory_bytes: int | None = None,
        num_gpu_blocks_override: int | None = None,
        gpu_memory_utilization: float = 0.9,
        enable_prefix_caching: bool = True,
        prefix_cache_secret: bytes | None = None,
        seed: int = 0,
        max_logprobs: int = 20,
        deterministic: bool = False,
        lazy_compile: bool = False,
        **others: Any,
    ) -> None:
        check_others(others)
        if skip_tokenizer_init and tokenizer is not None:
            raise ValueError(
                f"tokenizer: expected None with skip_tokenizer_init=True, got {tokenizer!r}"
            )
        self._device = jax.devices()[0]
        check_backend(backend)
        self._compile_cache = use_compile_cache(self._device)
        self._model = find_model(
            DEMO if model is None else model,
            revision=revision,
            tokenizer=tokenizer,
            skip_tokenizer_init=skip_tokenizer_init,
            dtype=dtype,
            load_format=load_format,
            tensor_parallel_size=tensor_parallel_size,
            seed=seed,
            skip_layers=kv_cache_dtype_skip_layers,
        )
        spec = self._model.spec
        made: Any = {"platform": self._device.platform, "dtype": self._model.dtype}
        codecs = group_codecs(spec, kv_cache_dtype, kv_cache_dtype_skip_layers, **made)
        asked: Any = {
            "max_model_len": max_model_len,
            "max_num_seqs": max_num_seqs,
            "block_size": block_size,
        }
        asked |= {"max_num_batched_tokens": max_num_batched_tokens, "seed": seed}
        asked |= {"max_logprobs": spec.vocab_size if max_logprobs == -1 else max_logprobs}
        limits = engine_limits(self._device.platform, spec.max_len, **asked)
        self._backend, self._backend_reason = self._choose_backend(
            backend, limits, codecs, deterministic, kv_policy
        )
        where: Any = {"backend": self._backend, "num_devices": self._model.placement.size}
        limits = with_policy(limits, kv_policy, kv_budget, codecs, spec, **where)
        self._model = self._model.loaded(fits_keys=fits_keys(limits, codecs))
        self._budget = plan_pool(
            limits,
            bytes_with_low(limits, spec, codecs, **where),
            device_memory(
                self._device,
                weight_bytes=self._model.weight_bytes,
                utilization=gpu_memory_utilization,
            ),
            memory_bytes=kv_cache_memory_bytes,
            pages_override=num_gpu_blocks_override,
            programs_for=partial(self._programs_for, codecs),
        )
        self._config = replace(limits, num_pages=self._budget.num_pages)
        self._intake = self._make_intake(codecs, enable_prefix_caching, prefix_cache_secret)
        self._engine = self._make_engine(codecs, lazy_compile)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Completes every prompt; results in input order.

        prompts: a text, {"prompt": text} or {"prompt_token_ids": [...]}, or a list of them.
        sampling_params: one for all or one each (default: `get_default_sampling_params`). priority:
        one number per prompt, the lowest first.
        Raises: ValueError naming every bad index before any work starts.
        """
        listed = _listed(prompts)
        if priority is not None and (
            not isinstance(priority, (list, tuple)) or len(priority) != len(listed)
        ):
            raise ValueError(
                f"priority: expected a list of {len(listed)} numbers, got {priority!r:.80}"
            )
        params = self._listed_params(sampling_params, len(listed))
        return self._run(self._intake.accept(listed, params, priority), use_tqdm)

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Completes conversations: a list of {"role": ..., "content": ...} messages, or a list of
        such lists.

        The checkpoint's chat template (or `chat_template`) makes the prompts.
        Raises: ValueError if there is no template or it refuses a conversation, and as `generate`
        does.
        """
        if not isinstance(messages, (list, tuple)):
            raise ValueError(
                f"messages: expected a conversation or a list of them, got "
                f"{type(messages).__name__}"
            )
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        options: dict[str, Any] = {"chat_template": chat_template, "tools": tools}
        options |= {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
        }
        prompts = self._intake.render(conversations, chat_template_kwargs, **options)
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        use_tqdm: bool = False,
    ) -> list[BeamSearchOutput]:
        """The `beam_width` best sequences for every prompt, as transformers' beam search finds
        them; in input order.

        prompts: as in `generate`. Each beam takes a row, and while one runs, loops of all rows have
        one step.
        Raises: ValueError naming every bad index before any work starts.
        """
        submissions = self._intake.accept_searches(_listed(prompts), params)
        self._run(submissions, use_tqdm)
        tokenizer, include = self._model.tokenizer, params.include_stop_str_in_output
        decode = (
            None
            if tokenizer is None
            else partial(tokenizer.decode, clean_up_tokenization_spaces=False)
        )
        options: Any = {"eos_id": self._model.eos_id, "include_stop": include, "decode": decode}
        return [beam_output(submission, **options) for submission in submissions]

    def as_completed(
        self, requests: Iterable[tuple[Prompt | Conversation, SamplingParams | None]]
    ) -> Generator[tuple[int, RequestOutput | ValueError]]:
        """Yields (index, result) of every request in order of finishing; one that is refused gives
        its ValueError.

        requests: (prompt or list of chat messages, parameters or None for
        `get_default_sampling_params`) pairs. They
        may be endless: at most 2 * max_num_seqs are taken and not yet given back. Taking one that
        is slow to come holds up those that run. Closing the iterator ends what is left;
        finish_reason "abort" is as in a stream.
        Raises: ValueError at the call if `requests` is no iterable, and later what iterating over
        it raises.
        """
        if not isinstance(requests, Iterable):
            raise ValueError(
                f"requests: expected an iterable of (prompt, params), got {type(requests).__name__}"
            )
        return complete(self._engine, enumerate(map(self._accept_or_refuse, requests)))

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Yields what is new (text, token_ids, logprobs) as it is generated; the last one carries
        the finish_reason.

        Text comes in whole characters, and never with the beginning of a stop string. Closing the
        iterator ends the
        request. Raises: ValueError at the call, before anything is yielded.
        """
        (submission,) = self._intake.accept([prompt], self._listed_params(sampling_params, 1))
        return stream(self._engine, submission)

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's generation_config.json asks for, vLLM's defaults where it says nothing.

        Raises: ValueError if it asks for something that is out of range.
        """
        return self._model.default_params()

    @property
    def num_kv_tokens(self) -> int:
        """Tokens that the KV cache holds."""
        return self._config.num_pages * self._config.block_size

    @property
    def compile_s(self) -> float:
        """Seconds spent compiling so far."""
        return self._engine.programs.compile_s

    def get_tokenizer(self) -> Any:
        """The Hugging Face tokenizer, None with skip_tokenizer_init=True."""
        return self._model.tokenizer

    def page_table(self) -> dict[str, tuple[int, ...]]:
        """The page ids that every running request holds now, by request_id: a copy, to look at.

        Ids are 0 to num_kv_tokens / block_size - 1; a request's i-th page is for its tokens from i
        * block_size on, but for what a kv_policy has let go.
        Pages taken for its next tokens are listed too; what waits or needs no more steps holds none
        and is not listed.
        """
        running = self._engine.scheduler.running
        return {request.id: request.hold.handle().pages for request in running}

    def reset_prefix_cache(self) -> None:
        """Empties the prefix cache: nothing computed so far is used for requests that come from now
        on.
        """
        self._engine.scheduler.forget()

    def get_metrics(self, prefix: str = "jaxkv:") -> list[Metric]:
        """Counters, gauges and histograms under vLLM's names (and some of our own), behind
        `prefix`: "vllm:" makes them fit what is built for vLLM. `prometheus_text` writes them as
        Prometheus reads them.
        """
        return [replace(metric, name=prefix + metric.name) for metric in self._engine.metrics()]

    def describe(self) -> str:
        """What this engine is and has: model, memory, programs, backend and why."""
        model, config, programs = self._model, self._config, self._engine.programs
        spec, used = model.spec, self._engine.scheduler.allocator.num_used
        codecs = describe_codecs(spec, tuple(group.codec for group in self._engine.kv.groups))
        return "\n".join(
            (
                (
                    f"model     {model.directory} ({spec.family}, {spec.num_layers} layers, "
                    f"{spec.num_heads} query heads)"
                ),
                (
                    f"weights   {model.weight_bytes / 2**20:.1f} MiB {model.dtype} on "
                    f"{model.placement}"
                ),
                f"kv cache  {self.num_kv_tokens} tokens = {config.num_pages} pages of "
                f"{config.block_size}, "
                f"{codecs}, {used} pages in use{self._describe_policy()}",
                f"limits    {config.max_num_seqs} rows, {config.max_model_len} tokens per row, "
                f"{config.max_num_batched_tokens} tokens per step, {config.decode_steps} decode "
                f"steps per loop",
                f"programs  {programs.num_compiled} compiled in {programs.compile_s:.1f} s: "
                f"steps of "
                f"{programs.token_buckets} tokens, loops of {programs.row_buckets} rows",
                f"cache     of compiled programs: {self._compile_cache}",
                f"backend   {self._backend} ({self._backend_reason})",
                *self._budget.lines(programs),
            )
        )

    def _describe_policy(self) -> str:
        config, (group, *_) = self._config, self._engine.kv.groups
        if config.read_pages:
            return (
                f"; kv_policy {config.kv_policy}: {config.read_pages} pages of a row are read "
                f"for a new token"
            )
        if not config.row_pages:
            return ""
        low = "" if group.low is None else f" and {config.low_row_pages} in {group.low.codec.name}"
        return f"; kv_policy {config.kv_policy}: {config.row_pages} pages per row{low}"

    def _make_intake(self, codecs: Codecs, share_prefixes: bool, secret: bytes | None) -> Intake:
        if not isinstance(share_prefixes, bool):
            raise ValueError(
                f"enable_prefix_caching: expected True or False, got {share_prefixes!r}"
            )
        if not isinstance(secret, bytes | None):
            raise ValueError(
                f"prefix_cache_secret: expected bytes or None, got {type(secret).__name__}"
            )
        secret = secrets.token_bytes(32) if secret is None else secret
        # Which weights is not asked: the cache ends with the engine, which has only one model.
        root = root_key(secret, repr(self._model.spec), self._model.dtype, repr(codecs))
        return Intake(self._model, self._config, cache_root=root, share_prefixes=share_prefixes)

    def _choose_backend(
        self, name: str, limits: EngineConfig, codecs: Codecs, deterministic: bool, kv_policy: str
    ) -> tuple[str, str]:
        heads = heads_of(self._model.spec, num_devices=self._model.placement.size)
        needs = partial(
            Needs,
            page_size=limits.block_size,
            num_rows=limits.max_num_seqs,
            pages_per_row=limits.pages_per_row,
            platform=self._device.platform,
            compute_capability=getattr(self._device, "compute_capability", None),
            kv_policy=kv_policy if asks_backend(get_policy(kv_policy)) else None,
        )
        return choose_backend(
            name, heads, [needs(codec=codec) for codec in codecs], deterministic=deterministic
        )

    def _programs_for(self, codecs: Codecs, config: EngineConfig, num_pages: int) -> Programs:
        """Programs for a pool of `num_pages`, not compiled; `config` gives the rest. Allocates
        nothing.
        """
        spec, weights, placement = self._model.spec, self._model.weights, self._model.placement
        sized = replace(config, num_pages=num_pages)
        kv = abstract_kv(spec, sized, codecs, backend=self._backend, placement=placement)
        return Programs(
            weights, kv, spec=spec, config=config, backend=self._backend, placement=placement
        )

    def _make_engine(self, codecs: Codecs, lazy_compile: bool) -> Engine:
        config, tokenizer = self._config, self._model.tokenizer
        programs = self._programs_for(codecs, config, config.num_pages)
        self._budget.compile(programs, lazy=lazy_compile)
        where: Any = {"backend": self._backend, "placement": self._model.placement}
        make_kv = partial(empty_kv, self._model.spec, config, codecs, **where)
        return Engine(
            self._model.weights,
            make_kv(),
            programs,
            config,
            make_kv=make_kv,
            decode_token=None if tokenizer is None else lambda token: tokenizer.decode([token]),
        )

    def _listed_params(
        self, params: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> Sequence[SamplingParams]:
        if params is None:
            return [self.get_default_sampling_params()] * count
        if isinstance(params, SamplingParams):
            return [params] * count
        if not isinstance(params, (list, tuple)):
            raise ValueError(
                f"sampling_params: expected SamplingParams or a list, got {type(params).__name__}"
            )
        if len(params) != count:
            raise ValueError(
                f"sampling_params: expected one or {count} (one per prompt), got {len(params)}"
            )
        return params

    def _accept_or_refuse(self, pair: Any, priority: int = 0) -> Submission | ValueError:
        try:
            if not isinstance(pair, tuple) or len(pair) != 2:
                raise ValueError(
                    f"expected (prompt, SamplingParams or None), got {type(pair).__name__}"
                )
            prompt, params = pair
            if isinstance(prompt, (list, tuple)):
                (prompt,) = self._intake.render([prompt], add_generation_prompt=True)
            chosen = self.get_default_sampling_params() if params is None else params
            (submission,) = self._intake.accept([prompt], [chosen], [priority])
        except ValueError as error:
            # Their index in a list of one says nothing here.
            return ValueError(
                str(error).removeprefix("prompt 0: ").removeprefix("conversation 0: ")
            )
        return submission

    def _run(self, submissions: list[Submission], use_tqdm: bool) -> list[RequestOutput]:
        from tqdm import tqdm

        with (
            tqdm(total=len(submissions), desc="Processed prompts", disable=not use_tqdm) as bar,
            closing(complete(self._engine, enumerate(submissions))) as completed,
        ):
            for _ in completed:
                bar.update()
        return [submission.output() for submission in submissions]


def _listed(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    listed = [prompts] if isinstance(prompts, (str, Mapping)) else prompts
    if not isinstance(listed, (list, tuple)):
        raise ValueError(
            f"prompts: expected a prompt or a list of them, got {type(prompts).__name__}"
        )
    return listed
