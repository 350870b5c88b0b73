"""Decides how many pages the pool gets."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

from jaxkv.build.memory import Budget, Memory
from jaxkv.config import EngineConfig, is_int
from jaxkv.errors import CapacityError
from jaxkv.programs.compiled import Programs

MARGIN = 0.01
"""Part of the limit that a pool whose size the programs' memory decides leaves unused."""

STEPS_PER_OCTAVE = {"cpu": 16, "accelerator": 64}
"""A pool that memory decides has one of so many sizes between a power of two and the next: a start
that finds a little more or less free memory has the same programs. What is available to a process
on a CPU changes by percents all the time, and the pool takes a quarter of it at most.
"""

ProgramsFor = Callable[[EngineConfig, int], Programs]
"""The programs of an engine whose pool has so many pages; what else they depend on is in the
config.
"""


def plan_pool(
    limits: EngineConfig,
    page_nbytes: int,
    memory: Memory,
    *,
    memory_bytes: int | None,
    pages_override: int | None,
    programs_for: ProgramsFor,
) -> Budget:
    """Returns the pages that were asked for, else as many as every row at full length takes and
    memory allows.

    `limits` gives rows, length and page size; `page_nbytes` is `Blueprint.page_nbytes`. Where the
    memory sets no limit for the pool, the largest of `programs_for` are compiled to learn what they
    leave. Nothing is allocated.
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
        at_most = min(wanted, _rounded(memory.free // page_nbytes, "accelerator"))
        most, compile_s = fit_pages(memory, page_nbytes, at_most, partial(programs_for, rows))
    elif (most := memory.pool_limit // page_nbytes) < 1:
        raise CapacityError(
            f"{page_nbytes} bytes needed for one page of KV cache, {memory.pool_limit} free"
        )
    _check_row(limits, most, "memory")
    kind = "cpu" if memory.pool_limit is not None else "accelerator"
    most = max(_rounded(most, kind), _row_pages(limits))
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
    """Raises: CapacityError if a row's budget, or a page in each of its tables, is more than the
    pool.
    """
    if (needed := _row_pages(limits)) > num_pages:
        what = "a row's kv_budget" if limits.row_pages else "one in each page table of a row"
        raise CapacityError(f"{needed} pages needed for {what}, {source} has room for {num_pages}")


def _row_pages(limits: EngineConfig) -> int:
    """Counts the pages that a row must be able to have."""
    return max(len(limits.windows), min(limits.row_pages, limits.pages_per_row))


def _rounded(num_pages: int, kind: str) -> int:
    """Returns the next lower of the sizes that there are."""
    step = max(1, 2 ** (num_pages.bit_length() - 1) // STEPS_PER_OCTAVE[kind])
    return num_pages // step * step


def _asked_pages(
    page_nbytes: int, memory_bytes: int | None, pages_override: int | None
) -> tuple[int, str] | None:
    """Returns (pages, name of the argument that asks for them)"""
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
    """Returns (most pages that fit beside the programs, seconds spent compiling), learned from
    pools below `at_most` pages.

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
    """Counts the pages that fit beside what stays for all programs and what the hungriest takes: a
    + b * pages for an (a, b).

    Raises: CapacityError if not even one page fits.
    """
    room = memory.free - kept_bytes - int(MARGIN * (memory.free + memory.taken))
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
    """Compiles the largest program of each kind for two pools, of which the larger has half of what
    would fit without programs.

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
    """Returns (a, b), whole bytes, of the line a + b * pages with b >= 0 that is nowhere below two
    points (pages, bytes).
    """
    (pages, nbytes), (more_pages, more_nbytes) = sorted((first, second))
    per_page = max(0, -(-(more_nbytes - nbytes) // (more_pages - pages)))
    return max(nbytes - per_page * pages, more_nbytes - per_page * more_pages), per_page
