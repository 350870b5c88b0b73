"""How many pages the pool gets, and the pool itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jaxkv.build.memory import Budget, Memory
from jaxkv.config import EngineConfig, is_int
from jaxkv.errors import CapacityError
from jaxkv.holding.retention import full_pages
from jaxkv.kv.codecs import Codec, PlainCodec, ScaledCodec, get_codec
from jaxkv.kv.policies import get_policy
from jaxkv.kv.state import GroupKV, PagedKV, choosing, empty_group
from jaxkv.models.decoder import heads_of
from jaxkv.models.spec import KVGroup, ModelSpec
from jaxkv.ops.attention import BACKENDS, Heads
from jaxkv.placement import EXTREMES, PAGES, Placement
from jaxkv.programs.compiled import Programs

MARGIN = 0.01
"""Part of the limit that a pool whose size the programs' memory decides leaves unused."""

Codecs = tuple[Codec, ...]
"""One for each KV group."""

ProgramsFor = Callable[[EngineConfig, int], Programs]
"""The programs of an engine whose pool has so many pages; what else they depend on is in the
config.
"""


def bytes_per_page(
    spec: ModelSpec, *, page_size: int, codecs: Codecs, backend: str, num_devices: int = 1
) -> int:
    """Bytes of one page over all layers of all groups, on each of the devices that divide the KV
    heads.
    """
    groups = zip(spec.groups, heads_of(spec, num_devices=num_devices), codecs, strict=True)
    of_layers = [
        (BACKENDS[backend].page_arrays(heads, page_size, codec), len(group.layers))
        for group, heads, codec in groups
    ]
    return sum(
        count * math.prod(x.shape) * x.dtype.itemsize for arrays, count in of_layers for x in arrays
    )


def bytes_with_low(
    limits: EngineConfig, spec: ModelSpec, codecs: Codecs, *, backend: str, num_devices: int = 1
) -> int:
    """`bytes_per_page` with what a policy has beside each: part of a demoted page, or the extremes
    of its keys.
    """
    made: Any = {"page_size": limits.block_size, "backend": backend, "num_devices": num_devices}
    nbytes, low = bytes_per_page(spec, codecs=codecs, **made), low_codecs(limits, codecs)
    if limits.read_pages:
        wide = [group for group in spec.groups if group.window is None]
        nbytes += sum(
            len(one.layers) * 2 * one.num_kv_heads // num_devices * one.head_dim * 4 for one in wide
        )
    if low is None:
        return nbytes
    return nbytes + -(
        -bytes_per_page(spec, codecs=low, **made) * limits.low_row_pages // limits.row_pages
    )


def plan_pool(
    limits: EngineConfig,
    page_nbytes: int,
    memory: Memory,
    *,
    memory_bytes: int | None,
    pages_override: int | None,
    programs_for: ProgramsFor,
) -> Budget:
    """The pages that were asked for, else as many as every row at full length takes and memory
    allows.

    `limits` gives rows, length and page size; `page_nbytes` is `bytes_per_page`. Where the memory
    sets no limit for the pool, the largest of `programs_for` are compiled to learn what they leave.
    Nothing is allocated.
    Raises: ValueError for a figure out of range, CapacityError if there is no room for a single
    page.
    """
    asked = _asked_pages(page_nbytes, memory_bytes, pages_override)
    if asked is not None:
        num_pages, name = asked
        _check_row(limits, num_pages, name)
        advice = f"lower {name}, max_num_batched_tokens or max_num_seqs"
        return Budget(
            memory=memory,
            num_pages=num_pages,
            page_nbytes=page_nbytes,
            reason=f"asked for by {name}",
            advice=advice,
        )
    wanted, compile_s = limits.max_num_seqs * limits.pages_per_row, 0.0
    if memory.pool_limit is None:
        # A small pool bounds the length of rows, and so other inputs: one that only tries the
        # compiler must not.
        rows = replace(limits, num_pages=limits.pages_per_row)
        at_most = min(wanted, memory.free // page_nbytes)
        most, compile_s = fit_pages(memory, page_nbytes, at_most, partial(programs_for, rows))
    elif (most := memory.pool_limit // page_nbytes) < 1:
        raise CapacityError(
            f"{page_nbytes} bytes needed for one page of KV cache, {memory.pool_limit} free"
        )
    _check_row(limits, most, "memory")
    return Budget(
        memory=memory,
        num_pages=min(wanted, most),
        page_nbytes=page_nbytes,
        reason="what max_num_seqs x max_model_len needs"
        if wanted <= most
        else "as many as memory allows",
        advice="lower max_num_batched_tokens or max_num_seqs, or set num_gpu_blocks_override",
        compile_s=compile_s,
    )


def _check_row(limits: EngineConfig, num_pages: int, source: str) -> None:
    """Raises: CapacityError if a row's budget is more than the pool."""
    if (needed := min(limits.row_pages, limits.pages_per_row)) > num_pages:
        raise CapacityError(
            f"{needed} pages needed for a row's kv_budget, {source} has room for {num_pages}"
        )


def _asked_pages(
    page_nbytes: int, memory_bytes: int | None, pages_override: int | None
) -> tuple[int, str] | None:
    """(pages, name of the argument that asks for them)"""
    if memory_bytes is not None and pages_override is not None:
        raise ValueError("expected kv_cache_memory_bytes or num_gpu_blocks_override, got both")
    if pages_override is not None:
        if not is_int(pages_override) or pages_override < 1:
            raise ValueError(
                f"num_gpu_blocks_override: expected a number >= 1, got {pages_override!r}"
            )
        return pages_override, "num_gpu_blocks_override"
    if memory_bytes is not None:
        if not is_int(memory_bytes) or memory_bytes < page_nbytes:
            raise ValueError(
                f"kv_cache_memory_bytes: expected at least one page, {page_nbytes}, got "
                f"{memory_bytes!r}"
            )
        return memory_bytes // page_nbytes, "kv_cache_memory_bytes"
    return None


def fit_pages(
    memory: Memory, page_nbytes: int, at_most: int, programs_for: Callable[[int], Programs]
) -> tuple[int, float]:
    """(most pages that fit beside the programs, seconds spent compiling), learned from pools below
    `at_most` pages.

    Raises: CapacityError if not even one page fits.
    """
    small, large = measured = _compile_two(at_most, programs_for)
    kept = large.wide_bytes + large.num_programs * max(
        program.code_bytes for program in large.memory
    )
    points = (
        [(programs.num_pages, one.temp_bytes) for one in programs.memory] for programs in measured
    )
    lines = [fit_line(*pair) for pair in zip(*points, strict=True)]
    return most_pages(memory, page_nbytes, kept, lines), small.compile_s + large.compile_s


def most_pages(
    memory: Memory, page_nbytes: int, kept_bytes: int, lines: Iterable[tuple[int, int]]
) -> int:
    """Pages that fit beside what stays for all programs and what the hungriest takes: a + b * pages
    for an (a, b).

    Raises: CapacityError if not even one page fits.
    """
    room = memory.free - kept_bytes - int(MARGIN * (memory.free + memory.used))
    lines = list(lines)
    num_pages = min((room - fixed) // (page_nbytes + per_page) for fixed, per_page in lines)
    if num_pages < 1:
        needed = max(page_nbytes + fixed + per_page for fixed, per_page in lines)
        raise CapacityError(
            f"{needed} bytes needed for one page of KV cache and the programs, {room} free: "
            f"lower max_num_batched_tokens or max_num_seqs, or raise gpu_memory_utilization"
        )
    return num_pages


def _compile_two(
    at_most: int, programs_for: Callable[[int], Programs]
) -> tuple[Programs, Programs]:
    """The largest step and loop for two pools, of which the larger has half of what would fit
    without programs.

    As large as that because a compiler that has memory to spare may spend it: for a small pool it
    has made three copies where it made one for a large one (docs/benchmarks/memory.md). Half of it
    again if the compiler says that it cannot.
    """
    count = max(2, at_most // 2)
    pair = programs_for(max(1, count * 3 // 4)), programs_for(count)
    try:
        for programs in pair:
            programs.compile_largest()
    except CapacityError:
        if count == 2:
            raise
        return _compile_two(count, programs_for)
    return pair


def fit_line(first: tuple[int, int], second: tuple[int, int]) -> tuple[int, int]:
    """(a, b), whole bytes, of the line a + b * pages with b >= 0 that is nowhere below two points
    (pages, bytes).
    """
    (pages, nbytes), (more_pages, more_nbytes) = sorted((first, second))
    per_page = max(0, -(-(more_nbytes - nbytes) // (more_pages - pages)))
    return max(nbytes - per_page * pages, more_nbytes - per_page * more_pages), per_page


def empty_kv(
    spec: ModelSpec,
    config: EngineConfig,
    codecs: Codecs,
    *,
    backend: str,
    placement: Placement | None = None,
) -> PagedKV:
    """The engine's zeroed KV state as the backend keeps it, on its devices, the default one without
    a placement.

    Raises: ValueError if the pool has more heads x pages than int32 can count.
    """
    for group in spec.groups:
        count = len(group.layers) * config.num_pages * 2 * group.num_kv_heads
        if count >= 2**31:
            raise ValueError(
                f"num_gpu_blocks_override: expected layers x pages x 2 KV heads < 2**31, got "
                f"{count}"
            )
    num_devices = 1 if placement is None else placement.size
    return _groups(spec, config, codecs, backend, num_devices=num_devices, placement=placement)


def abstract_kv(
    spec: ModelSpec, config: EngineConfig, codecs: Codecs, *, backend: str, placement: Placement
) -> PagedKV:
    """The shapes of `empty_kv` on devices that may be those of a topology. Allocates nothing."""
    make = partial(
        _groups, spec, config, codecs, backend, num_devices=placement.size, placement=None
    )
    kv = jax.eval_shape(make)
    return jax.tree.map(
        lambda x, parts: placement.abstract(x.shape, x.dtype, parts), kv, placement.kv(kv)
    )


def _groups(
    spec: ModelSpec,
    config: EngineConfig,
    codecs: Codecs,
    backend: str,
    *,
    num_devices: int,
    placement: Placement | None,
) -> PagedKV:
    """placement: where they are allocated; without one the default device, whatever they are
    divided over.
    """

    def where(parts: PartitionSpec) -> jax.sharding.Sharding | None:
        return None if placement is None else placement.sharding(parts)

    def empty(group: KVGroup, heads: Heads, codec: Codec, num_pages: int) -> GroupKV:
        arrays = BACKENDS[backend].page_arrays(heads, config.block_size, codec)
        of_all = (
            jax.ShapeDtypeStruct((x.shape[0] * num_devices, *x.shape[1:]), x.dtype) for x in arrays
        )
        sizes: Any = {"num_layers": len(group.layers), "num_pages": num_pages}
        made = empty_group(**sizes, page_arrays=tuple(of_all), codec=codec, device=where(PAGES))
        if not config.read_pages or group.window is not None:
            return made
        return choosing(
            made,
            group.num_kv_heads,
            group.head_dim,
            num_read=config.read_pages,
            device=where(EXTREMES),
        )

    groups = list(zip(spec.groups, heads_of(spec, num_devices=num_devices), strict=True))
    made = [
        empty(*pair, codec, config.num_pages) for pair, codec in zip(groups, codecs, strict=True)
    ]
    if (low := low_codecs(config, codecs)) is not None:
        of_low = (
            empty(*pair, codec, config.num_low_pages)
            for pair, codec in zip(groups, low, strict=True)
        )
        made = [replace(group, low=of) for group, of in zip(made, of_low, strict=True)]
    return PagedKV(groups=tuple(made))


def low_codecs(config: EngineConfig, codecs: Codecs) -> Codecs | None:
    """Of the pages that the config's policy demotes, by KV group; None if it demotes none."""
    policy = get_policy(config.kv_policy)
    if policy is None or policy.low is None:
        return None
    # None of those that pages are demoted to has another form elsewhere.
    return tuple(get_codec(policy.low, platform="cpu", dtype=codec.dtype) for codec in codecs)


def fits_keys(config: EngineConfig, codecs: Codecs) -> bool:
    """Whether keys are to be fitted to being quantised (`programs.fit_keys`), in some pages at
    least.
    """
    return any(codec.fits_keys for codec in codecs + (low_codecs(config, codecs) or ()))


def with_policy(
    limits: EngineConfig,
    name: str,
    budget: Any,
    codecs: Codecs,
    spec: ModelSpec,
    *,
    backend: str,
    num_devices: int,
) -> EngineConfig:
    """The limits with what a policy leaves of each row under a budget, in tokens.

    Raises: ValueError for an unknown policy or a budget that is too small, NotImplementedError for
    a codec of the pages that cannot be demoted from.
    """
    policy = get_policy(name)
    if policy is None:
        if budget is not None:
            raise ValueError(f"kv_budget: expected None with kv_policy {name}, got {budget!r}")
        return limits
    named = replace(limits, kv_policy=name)
    ratio, low = 1.0, low_codecs(named, codecs)
    rotating = [codec.name for codec in codecs if not isinstance(codec, (PlainCodec, ScaledCodec))]
    if (low is not None or policy.reads_some) and rotating:
        raise NotImplementedError(
            f"kv_policy {name}: expected a kv_cache_dtype without a rotation, got {rotating[0]}"
        )
    if low is not None:
        sizes: Any = {
            "page_size": limits.block_size,
            "backend": backend,
            "num_devices": num_devices,
        }
        ratio = bytes_per_page(spec, codecs=low, **sizes) / bytes_per_page(
            spec, codecs=codecs, **sizes
        )
        if ratio >= 1:
            given = codecs[0].name
            raise ValueError(
                f"kv_policy {name}: expected a kv_cache_dtype larger than {low[0].name}, got "
                f"{given}"
            )
    if policy.reads_some:
        return replace(named, read_pages=full_pages(policy, budget, page_size=limits.block_size))
    full = min(full_pages(policy, budget, page_size=limits.block_size), limits.pages_per_row)
    demoted = int((budget / limits.block_size - full) / ratio) if low is not None else 0
    return replace(named, row_pages=full, low_row_pages=demoted)
