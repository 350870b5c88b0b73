"""Reads the prefill kernel's list of work, and the page tables of its rows, out of scalar memory.
Where tables do not fit it, those of two items are there, fetched from HBM one item ahead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.tpu.block import Static, div
from kernels_pallas.tpu.schedule import Schedule
from kernels_pallas.tpu.tiles import TILE


class Tables(NamedTuple):
    """Holds page ids and first positions of pages, flat or row by row."""

    table: Any
    first: Any


class Scalars(NamedTuple):
    """Holds lists of `PrefillItems` in scalar memory. lowest_I: None without a window; base [1]:
    the layer's first row in the pools; tables: None where they are streamed.
    """

    num: Any
    table_I: Any
    query_I: Any
    slot_I: Any
    low_I: Any
    high_I: Any
    lowest_I: Any
    base: Any
    tables: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """Tells what an item is about. tables: in scalar memory, or in HBM where they are streamed:
    held [2, ...] then has those of two items, asked their semaphores.
    """

    static: Static
    items: Scalars
    tables: Tables
    held: Any
    asked: Any

    @property
    def num(self) -> jax.Array:
        return self.items.num[0]

    def tokens(self, item: jax.Array) -> Any:
        """Returns which tokens of the packed queries are the item's."""
        return pl.ds(pl.multiple_of(self.items.query_I[item], TILE), self.static.queries)

    def ask(self, item: jax.Array) -> list[Any]:
        """Makes copies of the tables of an item's row to scalar memory."""
        slot = jax.lax.rem(item, jnp.int32(2))
        copies = [(self.tables.table, self.held.table)]
        if self.static.windowed:
            copies.append((self.tables.first, self.held.first))
        row = self.items.table_I[item]
        return [
            pltpu.make_async_copy(x.at[row], y.at[slot], self.asked.at[slot]) for x, y in copies
        ]

    def of_pages(self, item: jax.Array, *, first: bool = False) -> Callable[[jax.Array], jax.Array]:
        """Reads ids of the item's row's pages, or their first positions, by their place in it."""
        known = self.held if self.static.streamed else self.tables
        ref = known.first if first else known.table
        if self.static.streamed:
            slot = jax.lax.rem(item, jnp.int32(2))
            return lambda place: ref[slot, 0, place]
        start = self.items.table_I[item]
        return lambda place: ref[start + place]

    def begin(self, item: jax.Array, number: jax.Array) -> jax.Array:
        """Returns the first slot of an item's block, of those of the row."""
        return self.items.low_I[item] + number * self.static.slots

    def num_slots(self, item: jax.Array, number: jax.Array) -> jax.Array:
        """Counts the slots of an item's block that the row holds."""
        high, low, slots = self.items.high_I[item], self.items.low_I[item], self.static.slots
        return jnp.clip(high - low - number * slots, 0, slots)

    def num_blocks(self, item: jax.Array) -> jax.Array:
        slots = self.static.slots
        return div(self.items.high_I[item] - self.items.low_I[item] + slots - 1, slots)


def prefill_smem_bytes(schedule: Schedule) -> int:
    """Counts scalar memory where tables stay in HBM: for those of the rows of two items."""
    return 2 * 4 * (schedule.table.shape[-1] + schedule.first.shape[-1])
