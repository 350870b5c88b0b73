"""Moves what the prefill kernel reads and writes: pages from HBM to blocks in VMEM, queries to rows
of them, and results back.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.tpu.block import PerPool, Static, shifted, start_all, wait_all
from kernels_pallas.tpu.prefill_work import Work


@dataclass(frozen=True, kw_only=True, slots=True)
class Pages:
    """Moves the pages of an item's blocks, of which there are two of each pool in VMEM: one is
    fetched while the other one is attended. fetched: semaphores, one per slot.
    """

    static: Static
    work: Work
    pools: PerPool
    blocks: PerPool
    fetched: PerPool

    def fetch(self, item: jax.Array, number: jax.Array, slot: jax.Array) -> None:
        """Starts to fetch the pages of an item's block."""
        size = self.static.page_size
        # Read once: between two DMAs the compiler would read it again.
        page, high = self.work.of_pages(item), self.work.num_slots(item, number)
        begin = shifted(self.work.items.low_I[item], size) + number * self.static.block
        for i in range(self.static.block):
            # Not inside: what scalars say is read beside what comes before.
            copies = self._fetch_page(page(begin + i), i, slot)
            pl.when(i * size < high)(partial(start_all, copies))

    def await_fetch(self, item: jax.Array, number: jax.Array, slot: jax.Array) -> None:
        size = self.static.page_size
        pages_fetched = shifted(self.work.num_slots(item, number) + size - 1, size)
        if self.static.wait_by_page:

            @pl.loop(0, pages_fetched)
            def _(_: jax.Array) -> None:
                wait_all(self._fetch_page(jnp.int32(0), 0, slot))

            return
        for part, done in zip(self.blocks.each(), self.fetched.each(), strict=True):
            arrived = part.at[slot, pl.ds(0, pages_fetched)]
            pltpu.make_async_copy(arrived, arrived, done.at[slot]).wait()

    def clear_tail(self, high: jax.Array, slot: jax.Array, num_parts: int | jax.Array) -> None:
        """Clears what no one owns of the parts attended: it may be NaN, and 0 x NaN is NaN, so that
        a weight of zero does not clear a value.
        """
        layout, size, pages = self.static.layout, self.static.page_size, self.blocks.pages

        @pl.loop(shifted(high, size), num_parts * self.static.part)
        def _(i: jax.Array) -> None:
            rows = pl.ds(layout.values, layout.value_rows)
            values = pages[slot, i, rows]
            held = jax.lax.broadcasted_iota(jnp.int32, values.shape, 1) < high - i * size
            pages[slot, i, rows] = jnp.where(held, values, jnp.zeros_like(values))

    def _fetch_page(self, page: jax.Array, i: int, slot: jax.Array) -> list[Any]:
        parts = zip(self.pools.each(), self.blocks.each(), self.fetched.each(), strict=True)
        layer = pl.ds(self.work.items.base[0], self.static.num_pages)
        return [
            pltpu.make_async_copy(pool.at[layer].at[page], part.at[slot, i], done.at[slot])
            for pool, part, done in parts
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokens:
    """Moves an item's queries and results between HBM, where a token's lie side by side in its
    lanes, and rows: an item's tokens for one query after the other. query, result: a token's lanes
    in VMEM, on the way in and out; queried, sent: their semaphores.
    """

    static: Static
    work: Work
    q_TX: Any
    out_TX: Any
    query: Any
    result: Any
    queried: Any
    sent: Any

    def fetch(self, item: jax.Array) -> Any:
        return pltpu.make_async_copy(self.q_TX.at[self.work.tokens(item)], self.query, self.queried)

    def send(self, item: jax.Array) -> Any:
        return pltpu.make_async_copy(self.result, self.out_TX.at[self.work.tokens(item)], self.sent)

    def take(self, q_JRX: Any) -> None:
        """Makes rows of the queries that were fetched."""
        for j in range(self.static.layout.joined):
            for rows, lanes in self._places(j, self.static.layout.key_width):
                q_JRX[j, rows] = self.query[:, lanes]

    def put(self, j: int, found_RX: jax.Array) -> None:
        """Has the results of row `j` of heads lie where their tokens have them."""
        for rows, lanes in self._places(j, self.static.layout.out_width):
            self.result[:, lanes] = found_RX[rows]

    def _places(self, j: int, width: int) -> list[tuple[slice, slice]]:
        """Lists rows of row `j` of heads, and which lanes of their tokens are theirs."""
        queries = self.static.queries
        per_row = self.static.rows // queries
        rows = (i * queries for i in range(per_row))
        lanes = ((j * per_row + i) * width for i in range(per_row))
        return [
            (slice(row, row + queries), slice(lane, lane + width))
            for row, lane in zip(rows, lanes, strict=True)
        ]
