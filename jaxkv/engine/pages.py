"""Moves and measures whole pages between two steps, and notes what steps have said about them."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import numpy as np

from jaxkv.engine.rows import RowTables
from jaxkv.holding.hold import Kept, Pairs
from jaxkv.kv.state import GroupKV, PagedKV, Statistics
from jaxkv.programs.compiled import DEMOTED_AT_ONCE, Programs


def move_pages(
    programs: Programs, kv: PagedKV, rows: RowTables, *, copies: Pairs, demotions: Pairs
) -> PagedKV:
    """Returns the state with pages encoded anew, and then copied. Consumes `kv`."""
    for first in range(0, len(demotions), DEMOTED_AT_ONCE):
        some = demotions[first : first + DEMOTED_AT_ONCE]
        kv = programs.demote()(
            rows.without_rows(kv, 1), *_padded(some, DEMOTED_AT_ONCE), np.int32(len(some))
        )
    if copies:
        num_rows = programs.config.max_num_seqs
        kv = programs.copy()(
            rows.without_rows(kv, num_rows), *_padded(copies, num_rows), np.int32(len(copies))
        )
    return kv


def _padded(pairs: Pairs, size: int) -> np.ndarray:
    """Sources and targets, [2, size]."""
    page_2C = np.zeros((2, size), np.int32)
    page_2C[:, : len(pairs)] = np.transpose(pairs)
    return page_2C


def measure_pages(programs: Programs, kv: PagedKV, pages: list[int]) -> jax.Array:
    """Launches `state.measure_pages` of these pages; figures of others follow."""
    page_W = np.zeros(programs.config.table_width, np.int32)
    page_W[: len(pages)] = pages
    return programs.measure()(kv, page_W)


def observe(kept: tuple[Kept | None, ...], statistics: Statistics) -> None:
    """Adds what a step has observed to what its rows, in this order, hold."""
    mass_BW = np.asarray(statistics.mass_BW)
    low_BW = None if statistics.low_BW is None else np.asarray(statistics.low_BW)
    for row, one in enumerate(kept):
        if one is not None:
            one.mass += mass_BW[row]
            if low_BW is not None:
                one.low_mass += low_BW[row]


def freed_nbytes(kv: PagedKV, outcomes: Mapping[str, int]) -> int:
    """Bytes of pages that policies have given back, by what became of the pages."""

    def page_nbytes(group: GroupKV) -> int:
        pools = (group.pages,) if group.scales is None else (group.pages, group.scales)
        return sum(pool.nbytes for pool in pools) // group.num_pages

    full = sum(map(page_nbytes, kv.groups))
    low = sum(page_nbytes(group.low) for group in kv.groups if group.low is not None)
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
