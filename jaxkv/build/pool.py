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
    wanted = limits.max_num_seqs * limits.pages_per_row
    tried: tuple[Programs, ...] = ()
    if memory.pool_limit is None:
        # A small pool bounds the length of rows, and so other inputs: one that only tries the
        # compiler must not.
        rows = replace(limits, num_pages=limits.pages_per_row)
        at_most = min(wanted, _rounded(memory.free // page_nbytes, "accelerator"))
        most, tried = fit_pages(memory, page_nbytes, at_most, partial(programs_for, rows))
    elif (most := memory.pool_limit // page_nbytes) < 1:
        raise CapacityError(
            f"{page_nbytes} bytes needed for one page of KV cache, {memory.pool_limit} free"
        )
    _check_row(limits, most, "memory")
    kind = "cpu" if memory.pool_limit is not None else "accelerator"
    most = max(_rounded(most, kind), _row_pages(limits))
    num_pages = min(wanted, most)
    return Budget(
        memory=memory,
        num_pages=num_pages,
        page_nbytes=page_nbytes,
        reason="what max_num_seqs x max_model_len needs"
        if wanted <= most
        else "as many as memory allows",
        advice="lower max_num_batched_tokens or max_num_seqs, or set num_gpu_blocks_override",
        compile_s=sum(programs.compile_s for programs in tried),
        tried=next((one for one in tried if one.num_pages == num_pages), None),
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
) -> tuple[int, tuple[Programs, ...]]:
    """Returns (most pages that fit beside the programs, the programs of both pools of which that
    was learned).

    The second pool is what fits if temporaries do not grow with pages, as with kernels that update
    it in place: then that is the answer, and its programs are those of the engine.
    Raises: CapacityError if not even one page fits.
    """
    first = _compile_first(max(2, at_most // 2), programs_for)
    kept = first.wide_bytes + first.num_programs * max(
        program.code_bytes for program in first.memory
    )
    flat = [(program.temp_bytes, 0) for program in first.memory]
    smaller = max(1, first.num_pages * 3 // 4)
    guess = min(at_most, _pages_beside(memory, page_nbytes, kept, flat))
    guess = _rounded(guess, "accelerator") if guess >= 1 else smaller
    # Two points make a line.
    second = programs_for(guess if guess != first.num_pages else smaller)
    second.take_over(first)
    try:
        second.compile_largest()
    except CapacityError:
        second = programs_for(smaller)
        second.take_over(first)
        second.compile_largest()
    before = {program.name: program.temp_bytes for program in first.memory}
    lines = [
        fit_line((first.num_pages, before[one.name]), (second.num_pages, one.temp_bytes))
        for one in second.memory
    ]
    return most_pages(memory, page_nbytes, kept, lines), (first, second)


def most_pages(
    memory: Memory, page_nbytes: int, kept_bytes: int, lines: Iterable[tuple[int, int]]
) -> int:
    """Counts the pages that fit beside what stays for all programs and what the hungriest takes: a
    + b * pages for an (a, b).

    Raises: CapacityError if not even one page fits.
    """
    lines = list(lines)
    num_pages = _pages_beside(memory, page_nbytes, kept_bytes, lines)
    if num_pages < 1:
        room = _room(memory, kept_bytes)
        needed = max(page_nbytes + fixed + per_page for fixed, per_page in lines)
        raise CapacityError(
            f"{needed} bytes needed for one page of KV cache and the programs, {room} free: "
            f"lower max_num_batched_tokens or max_num_seqs, or raise gpu_memory_utilization"
        )
    return num_pages


def _pages_beside(
    memory: Memory, page_nbytes: int, kept_bytes: int, lines: Iterable[tuple[int, int]]
) -> int:
    """Counts as `most_pages`; below 1 where there is no room."""
    room = _room(memory, kept_bytes)
    return min((room - fixed) // (page_nbytes + per_page) for fixed, per_page in lines)


def _room(memory: Memory, kept_bytes: int) -> int:
    return memory.free - kept_bytes - int(MARGIN * (memory.free + memory.taken))


def _compile_first(num_pages: int, programs_for: Callable[[int], Programs]) -> Programs:
    """Compiles the largest program of each kind for a pool that has half of what would fit without
    programs; half of it again if the compiler says that it cannot.

    As large as that because a compiler that has memory to spare may spend it: for a small pool it
    has made three copies where it made one for a large one (docs/benchmarks/memory.md).
    """
    programs = programs_for(num_pages)
    try:
        programs.compile_largest()
    except CapacityError:
        if num_pages <= 2:
            raise
        return _compile_first(max(2, num_pages // 2), programs_for)
    return programs


def fit_line(first: tuple[int, int], second: tuple[int, int]) -> tuple[int, int]:
    """Returns (a, b), whole bytes, of the line a + b * pages with b >= 0 that is nowhere below two
    points (pages, bytes).
    """
    (pages, nbytes), (more_pages, more_nbytes) = sorted((first, second))
    per_page = max(0, -(-(more_nbytes - nbytes) // (more_pages - pages)))
    return max(nbytes - per_page * pages, more_nbytes - per_page * more_pages), per_page
