"""How many pages the pool gets."""

from __future__ import annotations

import os
from pathlib import Path

import jax

from jaxkv.config import EngineConfig, is_int
from jaxkv.errors import CapacityError
from jaxkv.kv.codecs import Codec
from jaxkv.kv.state import PagedKV, empty_group, page_bytes
from jaxkv.models.spec import ModelSpec

CPU_SHARE = 0.25
"""Most of the available memory that the pool takes on a CPU unless told otherwise."""

STEP_SHARE = 0.1
"""Part of an accelerator's memory budget that is left for the steps' temporaries."""


def bytes_per_page(spec: ModelSpec, *, page_size: int, codec: Codec) -> int:
    """Bytes of one page over all layers of all groups."""
    return sum(
        page_bytes(
            num_layers=len(group.layers),
            num_kv_heads=group.num_kv_heads,
            head_dim=group.head_dim,
            page_size=page_size,
            codec=codec,
        )
        for group in spec.groups
    )


def choose_num_pages(
    limits: EngineConfig,
    page_nbytes: int,
    device: jax.Device,
    *,
    memory_bytes: int | None,
    pages_override: int | None,
    utilization: float,
) -> int:
    """Pages that were asked for, else as many as every row at full length takes and memory allows.

    `limits` gives rows, length and page size; `page_nbytes` is `bytes_per_page`. Call it with the weights loaded.
    Raises: ValueError for a figure out of range, CapacityError if there is no room for a single page.
    """
    if memory_bytes is not None and pages_override is not None:
        raise ValueError("expected kv_cache_memory_bytes or num_gpu_blocks_override, got both")
    if not isinstance(utilization, (int, float)) or not 0 < utilization <= 1:
        raise ValueError(f"gpu_memory_utilization: expected a number in (0, 1], got {utilization!r}")
    if pages_override is not None:
        if not is_int(pages_override) or pages_override < 1:
            raise ValueError(f"num_gpu_blocks_override: expected a number >= 1, got {pages_override!r}")
        return pages_override
    if memory_bytes is not None:
        if not is_int(memory_bytes) or memory_bytes < page_nbytes:
            raise ValueError(f"kv_cache_memory_bytes: expected at least one page, {page_nbytes}, got {memory_bytes!r}")
        return memory_bytes // page_nbytes
    wanted = limits.max_num_seqs * -(-limits.max_model_len // limits.block_size)
    room = _free_bytes(device, utilization)
    if room < page_nbytes:
        raise CapacityError(f"{page_nbytes} bytes needed for one page of KV cache, {room} free on {device}")
    return min(wanted, room // page_nbytes)


def _free_bytes(device: jax.Device, utilization: float) -> int:
    """On a CPU at most a quarter of what this process (its cgroup) can still get; on an accelerator what `utilization`
    of its memory leaves beside what is in use, less a tenth for the temporaries of the steps."""
    if device.platform == "cpu":
        return int(available_memory() * min(CPU_SHARE, utilization))
    stats = device.memory_stats()
    if stats is None:
        raise CapacityError(f"{device} does not say how much memory it has; pass kv_cache_memory_bytes")
    return int((stats["bytes_limit"] * utilization - stats["bytes_in_use"]) * (1 - STEP_SHARE))


def empty_kv(spec: ModelSpec, config: EngineConfig, codec: Codec, device: jax.Device) -> PagedKV:
    """The engine's zeroed KV state on `device`.

    Raises: ValueError if the pool has more heads x pages than int32 can count.
    """
    for group in spec.groups:
        count = len(group.layers) * config.num_pages * 2 * group.num_kv_heads
        if count >= 2**31:
            raise ValueError(f"num_gpu_blocks_override: expected layers x pages x 2 KV heads < 2**31, got {count}")
    return PagedKV(
        groups=tuple(
            empty_group(
                num_layers=len(group.layers),
                num_kv_heads=group.num_kv_heads,
                head_dim=group.head_dim,
                num_pages=config.num_pages,
                page_size=config.block_size,
                codec=codec,
                device=device,
            )
            for group in spec.groups
        )
    )


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that can still be had: the system's figure, and on Linux the cgroup's where that is lower."""
    meminfo = root / "proc/meminfo"
    if not meminfo.is_file():
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    available = _fields(meminfo, ":")["MemAvailable"] * 1024
    v1 = root / "sys/fs/cgroup/memory"
    for limit, usage, cache in (
        (v1.parent / "memory.max", v1.parent / "memory.current", "inactive_file"),
        (v1 / "memory.limit_in_bytes", v1 / "memory.usage_in_bytes", "total_inactive_file"),
    ):
        if limit.is_file() and usage.is_file() and (text := limit.read_text().strip()) != "max":
            # What files left in the page cache counts as used, but is given back on demand.
            stat = usage.parent / "memory.stat"
            reclaimable = _fields(stat, " ").get(cache, 0) if stat.is_file() else 0
            available = min(available, max(0, int(text) - int(usage.read_text()) + reclaimable))
    return available


def _fields(path: Path, separator: str) -> dict[str, int]:
    """The `name<separator>number ...` lines of a kernel file."""
    pairs = (line.split(separator, 1) for line in path.read_text().splitlines() if separator in line)
    return {name: int(value.split()[0]) for name, value in pairs}
