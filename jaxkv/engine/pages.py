"""Moves and measures whole pages between two steps, and notes what steps have said about them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import jax
import numpy as np

from jaxkv.engine.plan import Plan
from jaxkv.holding.hold import Kept
from jaxkv.kv.state import PagedKV, Statistics, Store
from jaxkv.programs.compiled import COPIED_AT_ONCE, DEMOTED_AT_ONCE, Programs

MOVED_AT_ONCE = 16
"""Most pages that are read or written at once between the device and the host."""

IN_FLIGHT_BYTES = 2**27
"""Pages on their way to the host, and as many to the device, for which that has to have room beside
the pool, or one page, should that be more. A long prefix that returns drives out as many pages.
"""


def move_pages(programs: Programs, kv: PagedKV, plan: Plan) -> PagedKV:
    """Returns the state with what a plan has moved before it runs: pages encoded anew, then pages
    copied, then recurrent states, one after the other; without rows. Consumes `kv`.
    """
    kv = replace(kv, rows=())
    for kind, pairs, at_once in (
        (programs.demote, plan.demotions, DEMOTED_AT_ONCE),
        (programs.copy, plan.copies, programs.num_copies),
        (programs.copy_states, plan.state_copies, COPIED_AT_ONCE),
    ):
        for first in range(0, len(pairs), at_once):
            some = pairs[first : first + at_once]
            page_2C = np.zeros((2, at_once), np.int32)
            page_2C[:, : len(some)] = np.transpose(some)
            kv = kind()(kv, *page_2C, np.int32(len(some)))
    return kv


def moved_at_once(kv: PagedKV) -> tuple[int, int]:
    """Returns how many pages one call of `read_pages` or `write_pages` moves, and how many calls
    may be in flight each way.
    """
    most = IN_FLIGHT_BYTES // max(1, page_nbytes(kv)[0])
    at_once = max(1, min(MOVED_AT_ONCE, most))
    return at_once, max(1, most // at_once)


def chunks(pages: Sequence[int], at_once: int) -> Iterator[tuple[np.ndarray, int]]:
    """Yields page ids for `read_pages` and `write_pages`, so many at a time, the last ones padded,
    and how many they are.
    """
    for first in range(0, len(pages), at_once):
        some = pages[first : first + at_once]
        page_C = np.zeros(at_once, np.int32)
        page_C[: len(some)] = some
        yield page_C, len(some)


def measure_pages(programs: Programs, kv: PagedKV, pages: list[int]) -> jax.Array:
    """Launches `state.measure_pages` of these pages; figures of others follow."""
    page_W = np.zeros(programs.config.table_width, np.int32)
    page_W[: len(pages)] = pages
    return programs.measure()(replace(kv, rows=()), page_W)


def observe(kept: tuple[Kept | None, ...], statistics: Statistics) -> None:
    """Adds what a step has observed to what its rows, in this order, hold."""
    mass_BW = np.asarray(statistics.mass_BW)
    low_BW = None if statistics.low_BW is None else np.asarray(statistics.low_BW)
    for row, one in enumerate(kept):
        if one is not None:
            one.mass += mass_BW[row]
            if low_BW is not None:
                one.low_mass += low_BW[row]


def page_nbytes(kv: PagedKV) -> tuple[int, int]:
    """Returns the bytes of one page in all layers that it is of, and of a demoted one (0: none)."""

    def of(store: Store) -> int:
        return sum(pool.nbytes for pool in store.arrays) // store.num_pages

    lows = [store.low for store in kv.stores if store.low is not None]
    return sum(map(of, kv.stores)), sum(map(of, lows))


def slot_nbytes(kv: PagedKV) -> tuple[float, float]:
    """Returns the bytes of a token in one page table: in a page, and in a demoted one."""
    full, low = page_nbytes(kv)
    size = kv.stores[0].page_size
    return full / size, low / size


def freed_nbytes(kv: PagedKV, outcomes: Mapping[str, int]) -> int:
    """Counts the bytes of pages that policies have given back, by what became of the pages."""
    full, low = page_nbytes(kv)
    freed = (outcomes["demoted"] + outcomes["dropped"]) * full
    return freed + (outcomes["demoted_dropped"] - outcomes["demoted"]) * low


def is_computed(arrays: list[jax.Array]) -> bool:
    """Tells whether the arrays hold what they should: not where an interrupt came between donating
    one and receiving its successor, nor where the device failed while it computed one.
    """
    if any(array.is_deleted() for array in arrays):
        return False
    try:
        jax.block_until_ready(arrays)
    except jax.errors.JaxRuntimeError:
        return False
    return True
