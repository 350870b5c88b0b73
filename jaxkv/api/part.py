"""Builds an engine with all that belongs to it, on some of the devices; several of them where they
divide requests between them, two where prompts and outputs are computed apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from threading import RLock
from typing import Any

import jax

from jaxkv.build.blueprint import Blueprint, make_blueprint
from jaxkv.build.compile_cache import open_program_files
from jaxkv.build.memory import Budget, device_memory
from jaxkv.build.model import Model
from jaxkv.build.options import EngineOptions
from jaxkv.build.selftest import make_tested
from jaxkv.build.speculation import draft_options
from jaxkv.config import is_int
from jaxkv.engine.engine import Engine
from jaxkv.engine.host_moves import make_tiers
from jaxkv.holding.directory import Directory
from jaxkv.kv.saved import fingerprint
from jaxkv.ops import native
from jaxkv.placement import bytes_per_device, place
from jaxkv.processes import check_same, num_processes, own_device
from jaxkv.programs.executables import ProgramFiles
from jaxkv.version import VERSION
from jaxkv.weights.tree import Weights, with_adapters, with_draft

DECIDING = ("enable_prefix_caching", "enable_expert_parallel", "max_lora_rank", "deterministic")
"""Options that are in no other part of what several processes compare."""

PACKAGES = ("transformers", "tokenizers", "llguidance")
"""Stop strings and masks of grammars are as these make them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Holds a model with its weights on some devices, and what an engine on those is made from."""

    model: Model
    blueprint: Blueprint
    budget: Budget
    files: ProgramFiles | None
    adapters: Weights

    def on(self, devices: Sequence[jax.Device]) -> Part:
        """Returns a copy of it on other devices. Raises: CapacityError."""
        blueprint = self.blueprint.on(devices)
        return Part(
            model=self.model.on(blueprint),
            blueprint=blueprint,
            budget=replace(self.budget, tried=None, compile_s=0.0),
            files=open_program_files(blueprint.placement.devices),
            adapters=blueprint.empty_adapters(),
        )

    def copied(self, model: Model) -> Model:
        """Returns a copy on this part's devices of a model with other weights; the draft model
        stays the part's own.
        """
        blueprint = replace(self.blueprint, draft=None)
        return replace(replace(model, draft=None).on(blueprint), draft=self.model.draft)

    def make_engine(self, directory: Directory | None, lock: RLock | None = None) -> Engine:
        """Compiles the programs and allocates the KV cache. directory: where pages are kept too.
        lock: the one that it shares with others.
        """
        blueprint, tokenizer, draft = self.blueprint, self.model.tokenizer, self.model.draft
        programs = blueprint.programs(all_weights(self.model, self.adapters), files=self.files)
        # An engine that reads results first while something compiles plans otherwise.
        is_own = num_processes(blueprint.placement.devices) == 1
        self.budget.compile(programs, lazy=blueprint.options.lazy_compile, behind=is_own)
        options, kv = blueprint.options, blueprint.empty_kv()
        tiers = make_tiers(
            kv,
            host_bytes=options.kv_host_bytes,
            disk_bytes=options.kv_disk_bytes,
            directory=directory,
        )
        return Engine(
            self.model.weights,
            kv,
            programs,
            blueprint.limits,
            make_kv=blueprint.empty_kv,
            # Listed tokens repeat, and decoding one costs more than all else that lists it. The
            # vocabulary bounds the cache.
            decode_token=None if tokenizer is None else cache(lambda one: tokenizer.decode([one])),
            tiers=tiers,
            adapters=self.adapters,
            make_adapters=blueprint.empty_adapters,
            draft=None if draft is None else draft.weights,
            lock=lock,
        )


def make_parts(options: EngineOptions, model: Model, devices: Sequence[jax.Device]) -> list[Part]:
    """Returns what computes outputs, and behind it what computes prompts where that is apart, or
    copies of it that requests are divided between. Raises: as `LLM` does.
    """
    if options.data_parallel_size > 1:
        return _make_replicas(options, model, devices)
    if options.disaggregate is None:
        return [_make_part(options, model, devices)]
    first, second = options.disaggregate
    _refuse_model(model, is_even=first == second)
    if first + second > len(devices):
        raise ValueError(
            f"disaggregate: expected at most {len(devices)} devices in all, the devices here, got "
            f"{first} + {second}"
        )
    parts = devices[first : first + second], devices[:first]
    for own in parts:
        try:
            place(model.spec, model.layout, own, len(own))
        except ValueError as error:  # by the name of what nobody has given
            raise ValueError(f"disaggregate: of a part, {error}") from error
    return [
        _make_part(replace(options, tensor_parallel_size=len(own), disaggregate=None), model, own)
        for own in parts
    ]


def make_replicated(parts: Sequence[Part]) -> list[Engine]:
    """Makes engines that take turns, with one lock. They compile at the same time, as each needs
    programs of its own.
    """
    lock = RLock()
    with ThreadPoolExecutor(len(parts)) as threads:
        made = [threads.submit(part.make_engine, None, lock) for part in parts]
    return [one.result() for one in made]


def _make_replicas(
    options: EngineOptions, model: Model, devices: Sequence[jax.Device]
) -> list[Part]:
    count, size = options.data_parallel_size, options.tensor_parallel_size
    if is_int(size) and 1 <= size <= len(devices) < count * size:
        raise ValueError(
            f"data_parallel_size: expected at most {len(devices) // size}, as {len(devices)} "
            f"devices are here and an engine takes {size}, got {count}"
        )
    first = _make_part(options, model, devices)
    starts = range(size, count * size, size)
    return [first, *(first.on(devices[start : start + size]) for start in starts)]


def _make_part(options: EngineOptions, model: Model, devices: Sequence[jax.Device]) -> Part:
    is_shared = num_processes(devices) > 1
    if is_shared:
        # Before kernels are tried, which processes say to each other, and maybe not all.
        blueprint = _make_blueprint(options, model, devices, lambda make, options: make(options))
        is_shared = num_processes(blueprint.placement.devices) > 1
        if is_shared:
            _check_same(blueprint, model)
    blueprint = _make_blueprint(options, model, devices, make_tested)
    model = model.loaded(blueprint)
    adapters = blueprint.empty_adapters()
    memory = device_memory(
        own_device(devices),
        weight_bytes=model.weight_bytes + bytes_per_device(adapters),
        utilization=options.gpu_memory_utilization,
        num_engines=options.data_parallel_size,
    )
    memory = memory.agreed() if is_shared else memory
    files = open_program_files(blueprint.placement.devices)
    budget = blueprint.budget(memory, all_weights(model, adapters), files)
    if is_shared:
        check_same({"kv_cache_memory_bytes, num_gpu_blocks_override": budget.num_pages})
    blueprint = blueprint.with_pages(budget.num_pages)
    return Part(model=model, blueprint=blueprint, budget=budget, files=files, adapters=adapters)


def _check_same(blueprint: Blueprint, model: Model) -> None:
    """Raises: ValueError where another process would compute or decide otherwise."""
    draft = blueprint.draft
    parts: dict[str, Any] = {
        "jaxkv": VERSION,
        "jax": jax.__version__,
        "device": own_device(blueprint.placement.devices).device_kind,
        "model": blueprint.spec,
        "files": blueprint.layout,
        "draft model": None if draft is None else (draft.spec, draft.layout),
        "end tokens": (model.eos_id, sorted(model.eos_ids)),
        "tokenizer": _name_of(model.tokenizer),
        "decode_context_parallel_size": blueprint.placement.context,
        "machine code": (native.matmul_unused_because() is None, native.is_wide()),
    }
    for name in ("dtype", "quantization", "kv_cache_dtype", "backend"):
        parts[name] = getattr(blueprint, name)
    for name in DECIDING:
        parts[name] = getattr(blueprint.options, name)
    for name in PACKAGES:
        parts[name] = None
        with suppress(PackageNotFoundError):
            parts[name] = version(name)
    check_same(parts | asdict(blueprint.limits))


def _name_of(tokenizer: Any) -> str:
    """Returns a fingerprint of what a tokenizer makes texts by, "" of none."""
    if tokenizer is None:
        return ""
    is_fast = tokenizer.is_fast
    words = (
        tokenizer.backend_tokenizer.to_str() if is_fast else sorted(tokenizer.get_vocab().items())
    )
    return fingerprint([repr(words).encode()])


def _make_blueprint(
    options: EngineOptions,
    model: Model,
    devices: Sequence[jax.Device],
    tested: Callable[[Callable[[EngineOptions], Blueprint], EngineOptions], Blueprint],
) -> Blueprint:
    drafting, draft = draft_options(options, model.spec), None
    if drafting is not None and model.draft is not None:
        # Beside a model whose rows keep all, its own do.
        draft = tested(partial(_blueprint_of(model.draft, devices), keeps_all=True), drafting)
    return tested(partial(_blueprint_of(model, devices), draft=draft), options)


def _blueprint_of(model: Model, devices: Sequence[jax.Device]) -> Callable[..., Blueprint]:
    return partial(
        make_blueprint,
        spec=model.spec,
        layout=model.layout,
        devices=devices,
        stored_dtype=model.stored_dtype,
        pooled="" if model.pooling is None else model.pooling.kind,
    )


def all_weights(model: Model, adapters: Weights) -> Weights:
    """Returns the weights as programs take them: with adapters and those of a draft model."""
    draft = {} if model.draft is None else model.draft.weights
    return with_draft(with_adapters(model.weights, adapters), draft)


def _refuse_model(model: Model, *, is_even: bool) -> None:
    """Raises: NotImplementedError for one that does not go with `disaggregate`."""
    if model.pooling is not None:
        raise NotImplementedError(
            f"disaggregate: {model.directory}: a model that pools has prompts only"
        )
    if model.spec.depends_on_context:
        raise NotImplementedError(
            f"disaggregate: {model.directory}: its pages depend on how long a request may get"
        )
    if model.spec.states and not is_even:
        raise NotImplementedError(
            "disaggregate: expected as many devices for prompts as for outputs with recurrent "
            "states, which lie as devices divide them"
        )
