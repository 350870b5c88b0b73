"""Writes the keys and values of prefill chunks into their pages, a tile of TILE slots at a time.

A DMA cannot begin inside a register tile, so a tile is read, merged and written back, as decode does with its one
token; here several are on their way at once.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.tpu.schedule import WriteItems
from kernels_pallas.tpu.tiles import TILE

AHEAD = 4
SLOTS = 2 * AHEAD
"""Tiles on their way in, and as many on their way out."""


def _kernel(*refs: Any) -> None:
    num, page_I, offset_I, low_I, high_I, base, new_ICSX, _, pages, old, new, fetched, written = refs

    def tile_of(item: jax.Array) -> Any:
        offset = pl.multiple_of(offset_I[item], TILE)
        return pages.at[base[0] + page_I[item], :, pl.ds(offset, TILE)]

    def fetch(item: jax.Array) -> tuple[Any, Any]:
        slot = jax.lax.rem(item, jnp.int32(SLOTS))
        return (
            pltpu.make_async_copy(tile_of(item), old.at[slot], fetched.at[slot]),
            pltpu.make_async_copy(new_ICSX.at[item], new.at[slot], fetched.at[slot]),
        )

    def send(item: jax.Array) -> Any:
        slot = jax.lax.rem(item, jnp.int32(SLOTS))
        return pltpu.make_async_copy(old.at[slot], tile_of(item), written.at[slot])

    def start(item: jax.Array) -> None:
        @pl.when(item < num[0])
        def _() -> None:
            pl.when(item >= SLOTS)(lambda: send(item - SLOTS).wait())
            for copy in fetch(item):
                copy.start()

    pl.loop(0, AHEAD)(start)

    @pl.loop(0, num[0])
    def merge(item: jax.Array) -> None:
        start(item + AHEAD)
        for copy in fetch(item):
            copy.wait()
        slot = jax.lax.rem(item, jnp.int32(SLOTS))
        place = jax.lax.broadcasted_iota(jnp.int32, old.shape[1:], 1)
        written_here = (place >= low_I[item]) & (place < high_I[item])
        old[slot] = jnp.where(written_here, new[slot], old[slot])
        send(item).start()

    pl.loop(jnp.maximum(num[0] - SLOTS, 0), num[0])(lambda item: send(item).wait())


def write(
    new_TCX: jax.Array, pages: jax.Array, items: WriteItems, base: jax.Array, *, interpret: Any = False
) -> jax.Array:
    """The pages [L*P, C, S, X] with the items' tokens of new [T, C, X] (in the dtype of the pages) in their slots.

    base [1]: the layer's first row in `pages`. Pages are updated in place when donated.
    """
    new_ICSX = new_TCX[items.token].transpose(0, 2, 1, 3)
    scalars = (items.num, items.page, items.offset, items.low, items.high, base)
    tiles = pltpu.VMEM((SLOTS, *new_ICSX.shape[1:]), pages.dtype)
    in_hbm = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        _kernel,
        name="paged_write",
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            in_specs=[in_hbm, in_hbm],
            out_specs=in_hbm,
            scratch_shapes=[tiles, tiles, *[pltpu.SemaphoreType.DMA((SLOTS,))] * 2],
        ),
        out_shape=jax.ShapeDtypeStruct(pages.shape, pages.dtype),
        input_output_aliases={len(scalars) + 1: 0},
        compiler_params=pltpu.CompilerParams(disable_bounds_checks=True, disable_semaphore_checks=True),
        interpret=interpret,
    )(*scalars, new_ICSX, pages)
