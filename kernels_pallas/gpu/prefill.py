"""Paged attention of prefill chunks for Hopper: blocks of queries against the pages of their row, which hold the step's
own keys and values already. Flash attention, arXiv 2205.14135, algorithm 1.

A persistent grid: as many blocks as there are processors, each with one warpgroup that has tiles of keys and values
fetched (TMA) into a ring in shared memory, and one or two that attend them, each for `ROWS` rows of queries. All query
heads of a KV head are rows of the same block, token by token.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.gpu.block import (
    MASKED,
    Registers,
    Ring,
    div,
    each_unit,
    fetch_tiles,
    num_parts,
    product,
    rem,
    scaled,
    tiled,
)
from kernels_pallas.gpu.schedule import TILE, PrefillItems, prefill_rows

ROWS = TILE
"""Rows of queries that a warpgroup works on."""

RING_BYTES = 128 << 10
MAX_STAGES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Static:
    """What is known when compiling. per_head: query heads of a KV head, rounded up to a power of two."""

    kv_heads: int
    head_dim: int
    per_head: int
    page_size: int
    scale: float
    softcap: float | None
    statistics: bool
    num_processors: int
    interpret: Any

    @property
    def rows(self) -> int:
        """Of a block: queries x heads."""
        return prefill_rows(self.head_dim)

    @property
    def workers(self) -> int:
        return self.rows // ROWS

    @property
    def stages(self) -> int:
        return min(MAX_STAGES, RING_BYTES // (2 * TILE * self.head_dim * 2))


def down(x_R: jax.Array, columns: int) -> jax.Array:
    """[R] -> [R, columns]."""
    return jax.lax.broadcast_in_dim(x_R, (x_R.shape[0], columns), [0])


def _kernel(static: Static, width: int, window: int | None, *refs: Any) -> None:
    num, row_I, slot_I, begin_I, tiles_I, high_I, table, first, base, q_IKRH, pages = refs[:11]
    num_outputs = 4 if static.statistics else 1
    outputs, scratch = refs[11 : 11 + num_outputs], refs[11 + num_outputs :]
    queries, keys, values, weights, *staged, queried, fetched, consumed, cleared = scratch
    registers = Registers(static.interpret)
    worker = jax.lax.axis_index("group")
    ring = Ring(keys, values, fetched, consumed)

    def fetch_unit(item: jax.Array, head: jax.Array, count: jax.Array) -> jax.Array:
        slots: Any = {"begin": begin_I[item], "high": high_I[item], "num_tiles": tiles_I[item]}
        row = row_I[item] * width
        return fetch_tiles(ring, pages, table, row=row, **slots, base=base[0], head=head, count=count)

    def key_position(item: jax.Array, start: jax.Array, shape: tuple[int, int]) -> jax.Array:
        """[ROWS, TILE]: position less slot of each key of a tile: its page's first position less its first slot."""
        size, column = static.page_size, registers.iota(shape, 1)
        shift = jnp.zeros(shape, jnp.int32)
        for part in range(num_parts(size)):
            page = jnp.minimum(div(start, size) + part, width - 1)
            of_page = first[row_I[item] * width + page] - page * size
            shift = jnp.where(column >= part * min(size, TILE), of_page, shift)
        return shift

    def attend_unit(item: jax.Array, head: jax.Array, count: jax.Array) -> jax.Array:
        begin, high = begin_I[item], high_I[item]
        query = queries.at[worker]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        own_rows = pl.ds(pl.multiple_of(worker * ROWS, ROWS), ROWS)
        plgpu.copy_gmem_to_smem(q_IKRH.at[item, head, own_rows], query, queried.at[worker])
        plgpu.barrier_wait(queried.at[worker])

        def seen(start: jax.Array) -> jax.Array:
            shape = (ROWS, TILE)
            at = registers.iota(shape, 1) + start
            own = ((registers.iota(shape, 0) + worker * ROWS) >> (static.per_head.bit_length() - 1)) + slot_I[item]
            mask = (at <= own) & (at < high)
            if window is None:
                return mask
            # Positions of a chunk are consecutive: the first query's tells those of all.
            page = div(jnp.minimum(slot_I[item], width * static.page_size - 1), static.page_size)
            of_own = first[row_I[item] * width + page] - page * static.page_size
            return mask & (own + of_own - at - key_position(item, start, shape) < window)

        def attend_tile(t: jax.Array, carry: tuple) -> tuple:
            count, old_max, old_sum, old_entropy, acc = carry
            slot = rem(count, ring.stages)
            start = begin + t * TILE
            plgpu.barrier_wait(fetched.at[slot])

            @pl.when(high - start < TILE)
            def _() -> None:
                pl.when(worker == 0)(lambda: registers.clear_tail(values.at[slot], high - start))
                plgpu.barrier_arrive(cleared)
                plgpu.barrier_wait(cleared)

            s = scaled(product(query, keys.at[slot].transpose((1, 0)), (ROWS, TILE)), static.scale, static.softcap)
            s = jnp.where(seen(start), s, MASKED)
            top = jnp.maximum(old_max, s.max(axis=1))
            shrink = jnp.exp2(old_max - top)
            distance = s - down(top, TILE)
            p = jnp.exp2(distance)
            total = old_sum * shrink + p.sum(axis=1)
            entropy = old_entropy
            if static.statistics:
                entropy = shrink * (old_entropy + old_sum * (old_max - top)) + (p * distance).sum(axis=1)
            acc = acc * down(shrink, static.head_dim)
            acc = registers.accumulate(acc, p.astype(pages.dtype), values.at[slot], weights.at[worker])
            plgpu.barrier_arrive(consumed.at[slot])
            return count + 1, top, total, entropy, acc

        none, worst = (registers.reduced(ROWS, value, axis=1) for value in (0.0, MASKED))
        begins = (count, worst, none, none, registers.full((ROWS, static.head_dim), 0.0))
        count, top, total, entropy, acc = jax.lax.fori_loop(0, tiles_I[item], attend_tile, begins)
        out, *others = outputs
        out.at[item, head, own_rows][...] = acc / down(total, static.head_dim)
        for source, x in zip(staged, (top, total, entropy), strict=False):
            source.at[worker][...] = x
        plgpu.commit_smem()
        for source, target in zip(staged, others, strict=True):
            plgpu.copy_smem_to_gmem(source.at[worker], target.at[item, head, own_rows])
        return count

    @pl.when(worker == static.workers)
    def _() -> None:
        if static.workers > 1:
            plgpu.set_max_registers(40, action="decrease")
        each_unit(num[0], static.kv_heads, static.num_processors, fetch_unit)

    @pl.when(worker < static.workers)
    def _() -> None:
        if static.workers > 1:
            plgpu.set_max_registers(232, action="increase")
        each_unit(num[0], static.kv_heads, static.num_processors, attend_unit)
        plgpu.wait_smem_to_gmem(0)


def prefill(
    q_IKRH: jax.Array, pages: jax.Array, items: PrefillItems, base: jax.Array, *, static: Static
) -> tuple[jax.Array, ...]:
    """-> out [items, K, R, H] float32, and if `static` asks for them max, sum and entropy accumulator
    [items, K, R] float32 (max and entropy in units of log 2).

    q: [items, K, R = static.rows, H] in the dtype of the pages [L*P, 2K, S, H], row query * per_head + head. base [1]:
    the layer's first page.
    """
    dtype, transforms = pages.dtype, tiled(pages.dtype)
    workers = static.workers
    shape = (items.row.shape[0], static.kv_heads, static.rows)
    statistics = [jax.ShapeDtypeStruct(shape, jnp.float32)] * (3 if static.statistics else 0)
    interpret = {"interpret": static.interpret} if static.interpret else {}
    tile = plgpu.SMEM((static.stages, TILE, static.head_dim), dtype, transforms=transforms)
    return plgpu.kernel(
        partial(_kernel, static, items.width, items.window),
        out_type=[jax.ShapeDtypeStruct((*shape, static.head_dim), jnp.float32), *statistics],
        grid=(static.num_processors,),
        grid_names=("block",),
        num_threads=workers + 1,
        thread_name="group",
        scratch_types=[
            plgpu.SMEM((workers, ROWS, static.head_dim), dtype, transforms=transforms),
            tile,
            tile,
            plgpu.SMEM((workers, ROWS, TILE), dtype, transforms=transforms),
            *[plgpu.SMEM((workers, ROWS), jnp.float32)] * len(statistics),
            plgpu.Barrier(num_barriers=workers),
            plgpu.Barrier(num_arrivals=2 * num_parts(static.page_size), num_barriers=static.stages),
            plgpu.Barrier(num_arrivals=workers, num_barriers=static.stages),
            plgpu.Barrier(num_arrivals=workers),
        ],
        **interpret,
    )(
        *(items.num, items.row, items.slot, items.begin, items.tiles, items.high),
        *(items.table, items.first, base, q_IKRH, pages),
    )
