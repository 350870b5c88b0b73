"""Writes the keys and values of prefill chunks into their pages, a tile of TILE slots at a time.

A DMA cannot begin inside a register tile, so a tile is read, merged and written back, as decode
does with its one token; here several are on their way at once. Of packed pages a "tile" is a page:
its scales are one piece.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.tpu.block import start_all, wait_all
from kernels_pallas.tpu.packing import Packing, to_width
from kernels_pallas.tpu.schedule import WriteItems
from kernels_pallas.tpu.tiles import TILE

AHEAD = 4
SLOTS = 2 * AHEAD
"""Tiles on their way in, and as many on their way out."""


def _kernel(packing: Packing | None, page_size: int, *refs: Any) -> None:
    num, page_I, offset_I, low_I, high_I, base, *rest = refs
    num_pools = 1 if packing is None else 2
    news, pools, rest = rest[:num_pools], rest[2 * num_pools : 3 * num_pools], rest[3 * num_pools :]
    olds, held, semaphores = (
        rest[:num_pools],
        rest[num_pools : 2 * num_pools],
        rest[2 * num_pools :],
    )
    fetched, written = semaphores[:num_pools], semaphores[num_pools:]
    rows = olds[0].shape[2]

    def places(item: jax.Array) -> list[Any]:
        page = base[0] + page_I[item]
        offset = 0 if packing is not None else pl.multiple_of(offset_I[item], TILE)
        return [pools[0].at[page, :, pl.ds(offset, rows)], *(pool.at[page] for pool in pools[1:])]

    def fetch(item: jax.Array) -> list[Any]:
        slot = jax.lax.rem(item, jnp.int32(SLOTS))
        of_pools = zip(places(item), olds, fetched, strict=True)
        of_new = zip(news, held, fetched, strict=True)
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
        of_pools = zip(places(item), olds, written, strict=True)
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
        old, new = olds[0], held[0]
        if packing is None:
            place = jax.lax.broadcasted_iota(jnp.int32, old.shape[1:], 1)
            written_here = (place >= low_I[item]) & (place < high_I[item])
            old[slot] = jnp.where(written_here, new[slot], old[slot])
        else:
            bits = packing.mask(old.shape[1:], low_I[item], high_I[item])
            old[slot] = (old[slot] & ~bits) | (new[slot] & bits)
            old, new = olds[1], held[1]
            of_slot = jax.lax.rem(
                jax.lax.broadcasted_iota(jnp.int32, old.shape[1:], 1), jnp.int32(page_size)
            )
            old[slot] = jnp.where(
                (of_slot >= low_I[item]) & (of_slot < high_I[item]), new[slot], old[slot]
            )
        start_all(send(item))

    pl.loop(jnp.maximum(num[0] - SLOTS, 0), num[0])(lambda item: wait_all(send(item)))


def write(
    new_T: tuple[jax.Array, ...],
    pools: tuple[jax.Array, ...],
    items: WriteItems,
    base: jax.Array,
    *,
    packing: Packing | None,
    interpret: Any = False,
) -> tuple[jax.Array, ...]:
    """The pools with the items' tokens in their slots; updated in place when donated.

    new_T: [T, C, X] in the dtype of the pages; packed, numbers [T, C, X] int8 and words [T, words,
    K] int32, whose
    items are whole pages. base [1]: the layer's first row in the pools.
    """
    new_ICSX = new_T[0][items.token].transpose(0, 2, 1, 3)
    news, page_size = [new_ICSX], new_ICSX.shape[2]
    if packing is not None:
        of_page = new_T[1][items.token].transpose(0, 2, 3, 1)
        news = [
            packing.pack_values(new_ICSX),
            to_width(of_page.reshape(len(of_page), 1, -1), pools[1].shape[2]),
        ]
    scalars = (items.num, items.page, items.offset, items.low, items.high, base)
    tiles = [
        pltpu.VMEM((SLOTS, *new.shape[1:]), pool.dtype)
        for new, pool in zip(news, pools, strict=True)
    ]
    in_hbm = pl.BlockSpec(memory_space=pl.ANY)
    before = len(scalars) + len(news)
    return tuple(
        pl.pallas_call(
            partial(_kernel, packing, page_size),
            name="paged_write",
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=len(scalars),
                in_specs=[in_hbm] * (len(news) + len(pools)),
                out_specs=[in_hbm] * len(pools),
                scratch_shapes=[
                    *tiles,
                    *tiles,
                    *[pltpu.SemaphoreType.DMA((SLOTS,))] * (2 * len(pools)),
                ],
            ),
            out_shape=[jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in pools],
            input_output_aliases={before + i: i for i in range(len(pools))},
            compiler_params=pltpu.CompilerParams(
                disable_bounds_checks=True, disable_semaphore_checks=True
            ),
            interpret=interpret,
        )(*scalars, *news, *pools)
    )
