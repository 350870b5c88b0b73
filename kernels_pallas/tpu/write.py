"""Writes the keys and values of prefill chunks into their pages, a tile of TILE slots at a time.

A DMA cannot begin inside a register tile, so a tile is read, merged and written back, as decode
does with its one token; here several are on their way at once. Of packed pages a "tile" is a page:
its scales are one piece.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.tpu.block import PerPool, start_all, wait_all
from kernels_pallas.tpu.checks import compiler_params
from kernels_pallas.tpu.packing import Packing, to_width
from kernels_pallas.tpu.schedule import WriteItems
from kernels_pallas.tpu.tiles import TILE

AHEAD = 4
SLOTS = 2 * AHEAD
"""Tiles on their way in, and as many on their way out."""


class Scalars(NamedTuple):
    """Holds lists of `WriteItems` in scalar memory."""

    num: Any
    page_I: Any
    offset_I: Any
    low_I: Any
    high_I: Any
    base: Any


class Operands(NamedTuple):
    """Holds each item's new tile, and the pools, which the kernel reads as its results.

    Where pages are of floats a new tile is [slots, C*X], all rows of a page side by side, as XLA
    gathers whole tokens; where they are packed it is as in a page.
    """

    new: PerPool
    pools: PerPool


class Scratch(NamedTuple):
    """Holds SLOTS tiles as they are and as many new ones, semaphores of those fetched and those
    written.
    """

    old: PerPool
    new: PerPool
    fetched: PerPool
    written: PerPool


def _kernel(
    packing: Packing | None,
    page_size: int,
    scalars: Scalars,
    given: Operands,
    pools: PerPool,
    scratch: Scratch,
) -> None:
    num, low_I, high_I = scalars.num, scalars.low_I, scalars.high_I
    rows = scratch.old.pages.shape[2]

    def places(item: jax.Array) -> list[Any]:
        page = scalars.base[0] + scalars.page_I[item]
        offset = 0 if packing is not None else pl.multiple_of(scalars.offset_I[item], TILE)
        tile = pools.pages.at[page, :, pl.ds(offset, rows)]
        return [tile] if packing is None else [tile, pools.scales.at[page]]

    def fetch(item: jax.Array) -> list[Any]:
        slot = jax.lax.rem(item, jnp.int32(SLOTS))
        fetched = scratch.fetched.each()
        of_pools = zip(places(item), scratch.old.each(), fetched, strict=True)
        of_new = zip(given.new.each(), scratch.new.each(), fetched, strict=True)
        return [
            *(
                pltpu.make_async_copy(place, old.at[slot], done.at[slot])
                for place, old, done in of_pools
            ),
            *(
                pltpu.make_async_copy(new.at[item], part.at[slot], done.at[slot])
                for new, part, done in of_new
            ),
        ]

    def send(item: jax.Array) -> list[Any]:
        slot = jax.lax.rem(item, jnp.int32(SLOTS))
        of_pools = zip(places(item), scratch.old.each(), scratch.written.each(), strict=True)
        return [
            pltpu.make_async_copy(old.at[slot], place, done.at[slot])
            for place, old, done in of_pools
        ]

    def start(item: jax.Array) -> None:
        @pl.when(item < num[0])
        def _() -> None:
            pl.when(item >= SLOTS)(lambda: wait_all(send(item - SLOTS)))
            start_all(fetch(item))

    pl.loop(0, AHEAD)(start)

    @pl.loop(0, num[0])
    def merge(item: jax.Array) -> None:
        start(item + AHEAD)
        wait_all(fetch(item))
        slot = jax.lax.rem(item, jnp.int32(SLOTS))
        old, new = scratch.old.pages, scratch.new.pages
        if packing is None:
            width = old.shape[3]
            place = jax.lax.broadcasted_iota(jnp.int32, old.shape[2:], 0)
            written_here = (place >= low_I[item]) & (place < high_I[item])
            for row in range(old.shape[1]):
                of_row = new[slot, :, pl.ds(row * width, width)]
                old[slot, row] = jnp.where(written_here, of_row, old[slot, row])
        else:
            bits = packing.mask(old.shape[1:], low_I[item], high_I[item])
            old[slot] = (old[slot] & ~bits) | (new[slot] & bits)
            old, new = scratch.old.scales, scratch.new.scales
            of_slot = jax.lax.rem(
                jax.lax.broadcasted_iota(jnp.int32, old.shape[1:], 1), jnp.int32(page_size)
            )
            old[slot] = jnp.where(
                (of_slot >= low_I[item]) & (of_slot < high_I[item]), new[slot], old[slot]
            )
        start_all(send(item))

    pl.loop(jnp.maximum(num[0] - SLOTS, 0), num[0])(lambda item: wait_all(send(item)))


def write(
    new_T: PerPool,
    pools: PerPool,
    items: WriteItems,
    base: jax.Array,
    *,
    packing: Packing | None,
    interpret: Any = False,
) -> PerPool:
    """Returns the pools with the items' tokens in their slots; updated in place when donated.

    new_T: [T, C, X] in the dtype of the pages; packed, numbers [T, C, X] int8 and words [T, words,
    K] int32, whose items are whole pages. base [1]: the layer's first row in the pools.
    """
    num_tokens, num_rows, width = new_T.pages.shape
    num_items, tile_size = items.token.shape
    if packing is None:
        new = PerPool(new_T.pages.reshape(num_tokens, num_rows * width)[items.token], None)
    else:
        of_page = new_T.scales[items.token].transpose(0, 2, 3, 1)
        new = PerPool(
            packing.pack_values(new_T.pages[items.token].transpose(0, 2, 1, 3)),
            to_width(of_page.reshape(num_items, 1, -1), pools.scales.shape[2]),
        )
    scalars = Scalars(items.num, items.page, items.offset, items.low, items.high, base)
    given = Operands(new, pools)
    new_tiles = jax.tree.map(lambda x: pltpu.VMEM((SLOTS, *x.shape[1:]), x.dtype), new)
    old_tiles = new_tiles
    if packing is None:
        page_tile = (SLOTS, num_rows, tile_size, width)
        old_tiles = PerPool(pltpu.VMEM(page_tile, pools.pages.dtype), None)
    in_hbm = pl.BlockSpec(memory_space=pl.ANY)
    done = jax.tree.map(lambda _: pltpu.SemaphoreType.DMA((SLOTS,)), pools)
    # The pools come last among operands.
    before = len(jax.tree.leaves((scalars, given))) - len(pools.each())
    (pools_after,) = pl.pallas_call(
        partial(_kernel, packing, tile_size),
        name="paged_write",
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            in_specs=[jax.tree.map(lambda _: in_hbm, given)],
            out_specs=[jax.tree.map(lambda _: in_hbm, pools)],
            scratch_shapes=[Scratch(old_tiles, new_tiles, done, done)],
        ),
        out_shape=[jax.tree.map(lambda pool: jax.ShapeDtypeStruct(pool.shape, pool.dtype), pools)],
        input_output_aliases={before + i: i for i in range(len(pools.each()))},
        compiler_params=compiler_params(),
        interpret=interpret,
    )(scalars, given)
    return pools_after
