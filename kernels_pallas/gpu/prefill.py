"""Paged attention of prefill chunks for Hopper: blocks of queries against the pages of their row,
which hold the step's own keys and values already. Flash attention, arXiv 2205.14135, algorithm 1.

A persistent grid: as many blocks as there are processors, each with one warpgroup that has tiles of
keys and values fetched (TMA) into a ring in shared memory, and one or two that attend them, each
for `ROWS` rows of queries. All query heads of a KV head are rows of the same block, token by token.
int8 tiles: as in decode.
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
    div,
    each_unit,
    fetch_tiles,
    num_parts,
    pass_last,
    product,
    rem,
    ring_bytes,
    ring_types,
    scaled,
    tiled,
)
from kernels_pallas.gpu.schedule import TILE, PrefillItems, prefill_rows

ROWS = TILE
"""Rows of queries that a warpgroup works on."""

RING_BYTES = 128 << 10
MAX_STAGES = 4

INT8_STAGES = 2
"""Of tiles as matmuls take them, where int8 ones wait in stages of their own."""

FETCH_REGISTERS, ATTEND_REGISTERS = {False: 40, True: 88}, {False: 232, True: 208}
"""Of a thread where two warpgroups attend and one fetches, which turns int8 tiles into others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Static:
    """What is known when compiling. per_head: query heads of a KV head, rounded up to a power of
    two.
    """

    kv_heads: int
    head_dim: int
    per_head: int
    page_size: int
    int8: bool
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
        most = min(MAX_STAGES, RING_BYTES // (4 * TILE * self.head_dim))
        return min(INT8_STAGES, most) if self.int8 else most

    @property
    def arriving(self) -> int:
        """int8 tiles in shared memory: in the room that fewer stages leave, one at least."""
        tile, arrival = ring_bytes(self.head_dim, int8=True)
        return (
            max(1, min(MAX_STAGES, (RING_BYTES - self.stages * tile) // arrival))
            if self.int8
            else 0
        )


def down(x_R: jax.Array, columns: int) -> jax.Array:
    """[R] -> [R, columns]."""
    return jax.lax.broadcast_in_dim(x_R, (x_R.shape[0], columns), [0])


def _kernel(static: Static, width: int, window: int | None, *refs: Any) -> None:
    num, row_I, slot_I, begin_I, tiles_I, high_I, table, first, base, q_IKRH = refs[:10]
    *pools, rest = (*refs[10 : 11 + static.int8], refs[11 + static.int8 :])
    num_outputs = 4 if static.statistics else 1
    outputs, (queries, ring, arrivals, weights, *staged, queried, cleared) = (
        rest[:num_outputs],
        rest[num_outputs:],
    )
    registers = Registers(static.interpret)
    worker = jax.lax.axis_index("group")

    def fetch_unit(item: jax.Array, head: jax.Array, count: jax.Array) -> jax.Array:
        slots: Any = {"begin": begin_I[item], "high": high_I[item], "num_tiles": tiles_I[item]}
        row = row_I[item] * width
        unit: Any = {
            "row": row,
            **slots,
            "base": base[0],
            "head": head,
            "count": count,
            "registers": registers,
        }
        return fetch_tiles(ring, arrivals, tuple(pools), table, **unit)

    def key_position(item: jax.Array, start: jax.Array, shape: tuple[int, int]) -> jax.Array:
        """[ROWS, TILE]: position less slot of each key of a tile: its page's first position less
        its first slot.
        """
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
            own = (
                (registers.iota(shape, 0) + worker * ROWS) >> (static.per_head.bit_length() - 1)
            ) + slot_I[item]
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
            plgpu.barrier_wait(ring.fetched.at[slot])

            if not static.int8:

                @pl.when(high - start < TILE)
                def _() -> None:
                    pl.when(worker == 0)(
                        lambda: registers.clear_tail(ring.values.at[slot], high - start)
                    )
                    plgpu.barrier_arrive(cleared)
                    plgpu.barrier_wait(cleared)

            s = product(query, ring.keys.at[slot].transpose((1, 0)), (ROWS, TILE))
            if static.int8:
                s *= registers.scales(ring.scales.at[slot, 0], 1, s.shape)
            s = jnp.where(seen(start), scaled(s, static.scale, static.softcap), MASKED)
            top = jnp.maximum(old_max, s.max(axis=1))
            shrink = jnp.exp2(old_max - top)
            distance = s - down(top, TILE)
            p = jnp.exp2(distance)
            total = old_sum * shrink + p.sum(axis=1)
            entropy = old_entropy
            if static.statistics:
                entropy = shrink * (old_entropy + old_sum * (old_max - top)) + (p * distance).sum(
                    axis=1
                )
            acc = acc * down(shrink, static.head_dim)
            if static.int8:
                # The scale of a slot that no one owns may be NaN.
                p = jnp.where(p > 0, p * registers.scales(ring.scales.at[slot, 1], 1, p.shape), 0.0)
            acc = registers.accumulate(
                acc, p.astype(weights.dtype), ring.values.at[slot], weights.at[worker]
            )
            plgpu.barrier_arrive(ring.consumed.at[slot])
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
            plgpu.set_max_registers(FETCH_REGISTERS[static.int8], action="decrease")
        pass_last(
            ring,
            arrivals,
            each_unit(num[0], static.kv_heads, static.num_processors, fetch_unit),
            registers,
        )

    @pl.when(worker < static.workers)
    def _() -> None:
        if static.workers > 1:
            plgpu.set_max_registers(ATTEND_REGISTERS[static.int8], action="increase")
        each_unit(num[0], static.kv_heads, static.num_processors, attend_unit)
        plgpu.wait_smem_to_gmem(0)


def prefill(
    q_IKRH: jax.Array,
    pools: tuple[jax.Array, ...],
    items: PrefillItems,
    base: jax.Array,
    *,
    static: Static,
) -> tuple[jax.Array, ...]:
    """-> out [items, K, R, H] float32, and if `static` asks for them max, sum and entropy
    accumulator [items, K, R] float32 (max and entropy in units of log 2).

    q: [items, K, R = static.rows, H] bfloat16, row query * per_head + head. pools, base: as
    `decode` takes them.
    """
    workers = static.workers
    shape = (items.row.shape[0], static.kv_heads, static.rows)
    statistics = [jax.ShapeDtypeStruct(shape, jnp.float32)] * (3 if static.statistics else 0)
    interpret = {"interpret": static.interpret} if static.interpret else {}
    sizes: Any = {
        "head_dim": static.head_dim,
        "page_size": static.page_size,
        "num_readers": workers,
    }

    def matrices(columns: int) -> Any:
        return plgpu.SMEM(
            (workers, ROWS, columns), jnp.bfloat16, transforms=tiled(jnp.bfloat16, columns)
        )

    return plgpu.kernel(
        partial(_kernel, static, items.width, items.window),
        out_type=[jax.ShapeDtypeStruct((*shape, static.head_dim), jnp.float32), *statistics],
        grid=(static.num_processors,),
        grid_names=("block",),
        num_threads=workers + 1,
        thread_name="group",
        scratch_types=[
            matrices(static.head_dim),
            *ring_types(stages=static.stages, arriving=static.arriving, **sizes),
            matrices(TILE),
            *[plgpu.SMEM((workers, ROWS), jnp.float32)] * len(statistics),
            plgpu.Barrier(num_barriers=workers),
            plgpu.Barrier(num_arrivals=workers),
        ],
        **interpret,
    )(
        *(items.num, items.row, items.slot, items.begin, items.tiles, items.high),
        *(items.table, items.first, base, q_IKRH, *pools),
    )
