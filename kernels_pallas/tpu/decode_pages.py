"""Moves pages between HBM and the decode kernel's blocks in VMEM: fetches what a row holds, clears
what nobody owns, and writes the step's own key and value back.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.tpu.block import PerPool, Static, rest, shifted, start_all, wait_all
from kernels_pallas.tpu.decode_work import Work
from kernels_pallas.tpu.tiles import TILE


@dataclass(frozen=True, kw_only=True, slots=True)
class Pages:
    """Moves the pages of items of `work`. pools: in HBM; base [1]: the layer's first row there.
    blocks: one of each pool per slot, in VMEM; new: what goes into a row's pages. fetched, written:
    semaphores, one per slot.
    """

    static: Static
    work: Work
    base: Any
    pools: PerPool
    blocks: list[PerPool]
    new: PerPool
    fetched: PerPool
    written: PerPool

    def fetch(self, item: jax.Array, slot: int) -> None:
        """Starts to fetch an item's pages."""
        size, high, page = self.static.page_size, self.work.high(item), self.work.pages(item)
        for i in range(self.static.block):
            # Not inside: what scalars say is read beside what comes before.
            copies = self._fetch_page(page(i), i, slot)
            pl.when(i * size < high)(partial(start_all, copies))

    def await_fetch(self, item: jax.Array, slot: int) -> None:
        size = self.static.page_size
        num_pages = shifted(self.work.high(item) + size - 1, size)
        if self.static.wait_by_page:

            @pl.loop(0, num_pages)
            def _(_: jax.Array) -> None:
                wait_all(self._fetch_page(jnp.int32(0), 0, slot))

            return
        for part, done in zip(self.blocks[slot].each(), self.fetched.each(), strict=True):
            arrived = part.at[pl.ds(0, num_pages)]
            pl.when(num_pages > 0)(pltpu.make_async_copy(arrived, arrived, done.at[slot]).wait)

    def clear_tail(self, item: jax.Array, slot: int, attended: int | jax.Array) -> None:
        """Clears what no one owns of the pages that are attended: it may be NaN, and 0 x NaN is
        NaN, so that a weight of zero does not clear a value.
        """
        layout, size = self.static.layout, self.static.page_size
        pages, high = self.blocks[slot].pages, self.work.high(item)

        @pl.loop(shifted(high, size), attended)
        def _(i: jax.Array) -> None:
            rows = pl.ds(layout.values, layout.value_rows)
            values = pages[i, rows]
            held = jax.lax.broadcasted_iota(jnp.int32, values.shape, 1) < high - i * size
            pages[i, rows] = jnp.where(held, values, jnp.zeros_like(values))

    def store_new(self, item: jax.Array, slot: int) -> None:
        """Puts the step's key and value among the fetched pages, from where their tile goes back to
        HBM.
        """
        layout, packing, pages = self.static.layout, self.static.packing, self.blocks[slot].pages
        new, row = self.work.new(item), self.work.row(item)
        i, lines, place = self._tile_of_new(item)
        tiles = [(i, c, lines) for c in range(layout.rows)]
        line, shift = (place, place) if packing is None else packing.place(place)
        here = jax.lax.broadcasted_iota(jnp.int32, (lines.size, layout.width), 0) == line
        here &= new >= 0
        merged = []
        for c, at in enumerate(tiles):
            old = pages[at]
            values = jnp.broadcast_to(self.new.pages[row, pl.ds(c, 1)], here.shape)
            if packing is None:
                values = values.astype(old.dtype)
            else:
                field = jax.lax.shift_left(jnp.int32(2**packing.num_bits - 1), shift)
                values = (old & ~field) | jax.lax.shift_left(values, shift)
            merged.append(jnp.where(here, values, old))
        # All loads before all stores, which the compiler cannot reorder: it does not know that the
        # tiles differ.
        for at, values in zip(tiles, merged, strict=True):
            pages[at] = values
        if packing is not None:
            self._store_new_scales(item, slot, i)

    def _store_new_scales(self, item: jax.Array, slot: int, i: jax.Array) -> None:
        size, scales = self.static.page_size, self.blocks[slot].scales
        new, old = self.work.new(item), scales[i]
        of_slot = rest(jax.lax.broadcasted_iota(jnp.int32, old.shape, 1), size)
        here = (of_slot == rest(new, size)) & (new >= 0)
        scales[i] = jnp.where(here, self.new.scales[self.work.row(item)], old)

    def start_write(self, item: jax.Array, slot: int) -> None:
        """Starts to write the tile of the step's key and value, where the item has one."""
        copies = self._write_tile(item, slot)
        pl.when(self.work.new(item) >= 0)(partial(start_all, copies))

    def await_write(self, item: jax.Array, slot: int) -> None:
        """Waits until the tile of an item, -1: of none, has left: its slot is free then."""
        known = jnp.maximum(item, 0)
        copies = self._write_tile(known, slot)
        pl.when((item >= 0) & (self.work.new(known) >= 0))(partial(wait_all, copies))

    def _fetch_page(self, page: jax.Array, i: int, slot: int) -> list[Any]:
        parts = zip(self.pools.each(), self.blocks[slot].each(), self.fetched.each(), strict=True)
        return [
            pltpu.make_async_copy(self._of_layer(pool).at[page], part.at[i], done.at[slot])
            for pool, part, done in parts
        ]

    def _of_layer(self, pool: Any) -> Any:
        return pool.at[pl.ds(self.base[0], self.static.num_pages)]

    def _tile_of_new(self, item: jax.Array) -> tuple[jax.Array, Any, jax.Array]:
        """Returns (page of the block, lines of it that are the tile, slot in the tile)."""
        size, packing = self.static.page_size, self.static.packing
        tile, per_word = (TILE, 1) if packing is None else (packing.tile, packing.per_word)
        at = jnp.maximum(self.work.new(item), 0)
        place, lines = rest(at, tile), tile // per_word
        start = pl.multiple_of(shifted(rest(at, size) - place, per_word), lines)
        return shifted(at, size), pl.ds(start, lines), place

    def _write_tile(self, item: jax.Array, slot: int) -> list[Any]:
        i, lines, _ = self._tile_of_new(item)
        block, pools, written = self.blocks[slot], self.pools, self.written
        page = self.work.pages(item)(i)
        source, target = block.pages.at[i, :, lines], self._of_layer(pools.pages).at[page, :, lines]
        copies = [pltpu.make_async_copy(source, target, written.pages.at[slot])]
        if self.static.packing is not None:
            source, target = block.scales.at[i], self._of_layer(pools.scales).at[page]
            copies.append(pltpu.make_async_copy(source, target, written.scales.at[slot]))
        return copies
