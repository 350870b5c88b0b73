"""Divides the memory of a device into its parts: weights, the pool, and what compiled programs take
beside them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

import jax

from jaxkv.errors import CapacityError
from jaxkv.processes import of_all
from jaxkv.programs.compiled import ProgramMemory, Programs

MIB = 2**20

CPU_SHARE = 0.25
"""Most of the available memory that the pool takes on a CPU unless told otherwise."""

AMPLE = 2**30
"""Bytes that programs never need on a CPU: those of the 1.1B shape have 165 MiB of temporaries."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Counts the bytes of one device: what an engine may use of it (None: it does not say), and
    what of that is in use before the pool comes, mostly weights. `source` says where the limit
    comes from. `pool_limit`: what the pool may take unless told otherwise; None: all that weights
    and programs leave. `state_bytes`: what the recurrent states of all slots take, whatever the
    pool has.
    """

    limit: int | None
    used: int
    source: str
    pool_limit: int | None = None
    state_bytes: int = 0

    def agreed(self) -> Memory:
        """Returns the least that any process has. All of them ask at the same time."""

        def least(own: int | None) -> int | None:
            return None if own is None else int(of_all(own).min())

        most_used = int(of_all(self.used).max())
        limit, pool_limit = least(self.limit), least(self.pool_limit)
        return replace(self, limit=limit, used=most_used, pool_limit=pool_limit)

    @property
    def taken(self) -> int:
        """Returns what is not there for pool and programs."""
        return self.used + self.state_bytes

    def with_states(self, nbytes: int) -> Memory:
        """Returns the memory of an engine with so many bytes of recurrent states."""
        limit = self.pool_limit
        limit = None if limit is None else max(0, limit - nbytes)
        return replace(self, state_bytes=nbytes, pool_limit=limit)

    @property
    def free(self) -> int:
        """Returns what is left for pool and programs. Raises: CapacityError if the device does not
        say what it has.
        """
        if self.limit is None:
            raise CapacityError(
                f"{self.source}; pass kv_cache_memory_bytes or num_gpu_blocks_override"
            )
        return self.limit - self.taken


def device_memory(
    device: jax.Device, *, weight_bytes: int, utilization: float, num_engines: int = 1
) -> Memory:
    """Returns the memory of `device`, to be asked with the weights loaded: on a CPU what this
    process (its cgroup) can still get and the weights, elsewhere the part `utilization` of what the
    device has.

    num_engines: that a CPU's memory is for, each with weights of its own; others have devices of
    their own.
    """
    if device.platform == "cpu":
        available = max(0, available_memory() - (num_engines - 1) * weight_bytes) // num_engines
        # Programs need little here, whatever the pool's size: compiling twice to learn how much is
        # not worth the wait.
        return Memory(
            limit=available + weight_bytes,
            used=weight_bytes,
            source="what is available to this process (system, cgroup), and its weights",
            pool_limit=int(available * min(CPU_SHARE, utilization)),
        )
    stats = device.memory_stats()
    if stats is None:
        return Memory(
            limit=None, used=weight_bytes, source=f"{device} does not say how much memory it has"
        )
    total = stats["bytes_limit"]
    source = (
        f"gpu_memory_utilization={utilization} of {total / MIB:.1f} MiB (memory_stats of {device})"
    )
    return Memory(limit=int(total * utilization), used=stats["bytes_in_use"], source=source)


def check_room(device: jax.Device, needed: int, what: str, advice: str) -> None:
    """Raises: CapacityError for more bytes than a device has free, before they are allocated: on a
    CPU the system would end this process when they are written.
    """
    memory = device_memory(device, weight_bytes=0, utilization=1.0)
    if memory.limit is not None and needed > memory.free:
        # In a notebook that is most often the LLM of the same cell, run before.
        used = f"; {memory.used} are in use, by another LLM (shutdown ends it) or your own arrays"
        raise CapacityError(
            f"{what}: {needed} bytes needed, {memory.free} free{used * (memory.used > 0)}: {advice}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """Says how one engine's share of its device is spent. `reason` says why the pool has
    `num_pages`, `advice` what to change should it not fit.
    """

    memory: Memory
    num_pages: int
    page_nbytes: int
    reason: str
    advice: str
    compile_s: float = 0.0
    """Spent on finding `num_pages`."""
    tried: Programs | None = None
    """Programs of a pool of that size, where finding it has compiled some."""

    @property
    def pool_bytes(self) -> int:
        return self.num_pages * self.page_nbytes

    def compile(self, programs: Programs, *, lazy: bool, behind: bool) -> None:
        """Compiles the whole set, unless `lazy`; in the background where it is sure to fit and may
        be `behind` what runs.

        Raises: CapacityError if it, or already the pool, does not fit.
        """
        self.check(programs)
        self.hand_over(programs)
        if lazy:
            return
        if behind and self._is_ample:
            programs.compile_in_background()
        else:
            self.compile_all(programs)

    def hand_over(self, programs: Programs) -> None:
        """Gives the engine's programs what finding the size of its pool has compiled of them."""
        programs.compile_s += self.compile_s
        if self.tried is not None:
            programs.take_over(self.tried)

    def compile_all(self, programs: Programs) -> None:
        """Returns when all are compiled. Raises: CapacityError if they do not fit."""
        programs.compile_all()
        self.check(programs)

    @property
    def _is_ample(self) -> bool:
        """Says whether programs fit whatever they take: only on a CPU, where their memory does not
        depend on the pool.
        """
        if self.memory.pool_limit is None:
            return False
        return self.memory.free - self.pool_bytes >= max(AMPLE, self.pool_bytes)

    def check(self, programs: Programs) -> None:
        """Raises CapacityError if pool and programs, those that are compiled, do not fit beside
        what was in use.
        """
        needed = self._needed(programs)
        if self.memory.limit is not None and needed > self.memory.limit:
            lines = "\n".join(self.lines(programs)[1:-1])
            raise CapacityError(
                f"{needed} bytes needed, {self.memory.limit} available ({self.memory.source}): "
                f"{self.advice}\n{lines}"
            )

    def _needed(self, programs: Programs) -> int:
        """Counts all bytes. Programs run one at a time; their code and the wide sampling parameters
        stay.
        """
        running = _largest(programs.memory).temp_bytes if programs.memory else 0
        return self.memory.taken + self.pool_bytes + running + _kept_bytes(programs)

    def parts(self, programs: Programs) -> dict[str, int]:
        """Returns by name the bytes of what takes a part of the memory."""
        memory, compiled = self.memory, programs.memory
        parts = {
            "weights, others": memory.used,
            "recurrent states": memory.state_bytes,
            "KV cache": self.pool_bytes,
            "temporaries": _largest(compiled).temp_bytes if compiled else 0,
            "code, inputs": _kept_bytes(programs),
        }
        return {name: size for name, size in parts.items() if size or name != "recurrent states"}

    def lines(self, programs: Programs) -> list[str]:
        """Formats the budget as people read it: the limit, one line for each that takes a part of
        it, what is left.
        """
        memory, compiled = self.memory, programs.memory
        left = None if memory.limit is None else memory.limit - self._needed(programs)
        states = _line(memory.state_bytes, "recurrent states of all slots")
        return [
            _line(memory.limit, f"limit: {memory.source}", label="memory"),
            _line(
                memory.used,
                "in use before the KV cache: weights, and on an accelerator whatever else there is",
            ),
            *[states] * (memory.state_bytes > 0),
            _line(self.pool_bytes, f"KV cache: {self.num_pages} pages, {self.reason}"),
            _line(
                _largest(compiled).temp_bytes if compiled else None, _describe_programs(programs)
            ),
            _line(
                _kept_bytes(programs),
                "kept for all programs: wide sampling parameters, code of what is compiled",
            ),
            _line(left, "left"),
        ]


def _line(num_bytes: int | None, what: str, *, label: str = "") -> str:
    return f"{label:<10}{'?' if num_bytes is None else f'{num_bytes / MIB:.1f}':>8} MiB  {what}"


def _describe_programs(programs: Programs) -> str:
    if not programs.num_compiled:
        return "temporaries of programs: not known yet, none is compiled"
    some = (
        f" of the {programs.num_compiled} compiled so far"
        if programs.num_compiled < programs.num_programs
        else ""
    )
    return (
        f"temporaries of the largest program{some}, the {_largest(programs.memory).name} (by "
        f"memory_analysis)"
    )


def _largest(memory: list[ProgramMemory]) -> ProgramMemory:
    return max(memory, key=lambda program: program.temp_bytes)


def _kept_bytes(programs: Programs) -> int:
    return programs.wide_bytes + sum(program.code_bytes for program in programs.memory)


def available_memory(root: Path = Path("/")) -> int:
    """Counts the bytes that can still be had: the system's figure, and on Linux the cgroup's where
    that is lower.
    """
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
    """Reads the `name<separator>number ...` lines of a kernel file."""
    pairs = (
        line.split(separator, 1) for line in path.read_text().splitlines() if separator in line
    )
    return {name: int(value.split()[0]) for name, value in pairs}
