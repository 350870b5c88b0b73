"""Paged attention of prefill chunks for Hopper: blocks of queries against the pages of their row,
which hold the step's own keys and values already. Flash attention, arXiv 2205.14135, algorithm 1.

A persistent grid: as many blocks as there are processors, each with one warpgroup that has tiles of
keys and values fetched (TMA) into a ring in shared memory, and one or two that attend them, each
for `ROWS` rows of queries. All query heads of a KV head are rows of the same block, token by token.
Quantised tiles: as in decode.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.gpu.block import (
    MASKED,
    QUANTISED_STAGES,
    Arrivals,
    Pools,
    Problem,
    Queries,
    Registers,
    Ring,
    div,
    each_unit,
    fetch_tiles,
    num_parts,
    pass_last,
    product,
    products_with_keys,
    rem,
    ring_bytes,
    ring_types,
    scaled,
    weights_of_values,
)
from kernels_pallas.gpu.schedule import TILE, PrefillItems, prefill_rows

ROWS = TILE
"""Rows of queries that a warpgroup works on."""

RING_BYTES = 128 << 10
MAX_STAGES = 4

FETCH_REGISTERS, ATTEND_REGISTERS = {False: 40, True: 88}, {False: 232, True: 208}
"""A thread has so many where two warpgroups attend and one fetches, which also (True) turns
quantised tiles into others.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Static:
    """Holds what is known when compiling. per_head: query heads of a KV head, rounded up to a power
    of two.
    """

    problem: Problem
    per_head: int

    @property
    def rows(self) -> int:
        """Counts the rows of a block: queries x heads."""
        return prefill_rows(self.problem.head_dim)

    @property
    def workers(self) -> int:
        return self.rows // ROWS

    @property
    def stages(self) -> int:
        most = min(MAX_STAGES, RING_BYTES // (4 * TILE * self.problem.head_dim))
        return min(QUANTISED_STAGES, most) if self.problem.is_quantised else most

    @property
    def arriving(self) -> int:
        """Counts quantised tiles in shared memory: in the room that fewer stages leave, one at
        least.
        """
        if not self.problem.is_quantised:
            return 0
        tile, arrival = ring_bytes(self.problem)
        return max(1, min(MAX_STAGES, (RING_BYTES - self.stages * tile) // arrival))


class Work(NamedTuple):
    """Holds the lists of `PrefillItems` that the kernel reads. lowest: None without a window."""

    num: Any
    row: Any
    slot: Any
    begin: Any
    tiles: Any
    high: Any
    lowest: Any
    table: Any
    first: Any


class Found(NamedTuple):
    """Holds outputs [items, K, R, H] float32 and, where sinks are to join the softmax, its max in
    units of log 2 and its sum [items, K, R]. In the kernel: references to them.
    """

    out_IKRH: Any
    max_IKR: Any
    sum_IKR: Any


class Scratch(NamedTuple):
    """Holds a block's shared memory and barriers. top, total: softmaxes on their way out, None
    where they are not wanted; queried: of each warpgroup's queries; cleared: a tile's tail is.
    """

    queries: Queries
    ring: Ring
    arrivals: Arrivals | None
    weights: Any
    top: Any
    total: Any
    queried: Any
    cleared: Any


def down(x_R: jax.Array, columns: int) -> jax.Array:
    """Repeats [R] as [R, columns]."""
    return jax.lax.broadcast_in_dim(x_R, (x_R.shape[0], columns), [0])


def _kernel(
    static: Static,
    width: int,
    work: Work,
    base: Any,
    queries: Queries,
    pools: Pools,
    found: Found,
    scratch: Scratch,
) -> None:
    problem, ring, cleared = static.problem, scratch.ring, scratch.cleared
    registers = Registers(problem.interpret)
    worker = jax.lax.axis_index("group")

    def fetch_unit(item: jax.Array, head: jax.Array, count: jax.Array) -> jax.Array:
        return fetch_tiles(
            ring,
            scratch.arrivals,
            pools,
            work.table,
            begin=work.begin[item],
            high=work.high[item],
            num_tiles=work.tiles[item],
            row=work.row[item] * width,
            base=base[0],
            head=head,
            count=count,
            registers=registers,
        )

    def key_position(item: jax.Array, start: jax.Array, shape: tuple[int, int]) -> jax.Array:
        """Returns [ROWS, TILE], position less slot of each key of a tile: its page's first position
        less its first slot.
        """
        size, column = problem.page_size, registers.iota(shape, 1)
        shift = jnp.zeros(shape, jnp.int32)
        for part in range(num_parts(size)):
            page = jnp.minimum(div(start, size) + part, width - 1)
            of_page = work.first[work.row[item] * width + page] - page * size
            shift = jnp.where(column >= part * min(size, TILE), of_page, shift)
        return shift

    def attend_unit(item: jax.Array, head: jax.Array, count: jax.Array) -> jax.Array:
        begin, high = work.begin[item], work.high[item]
        query, queried = scratch.queries.vectors.at[worker], scratch.queried.at[worker]
        query_sums = scratch.queries.sums.at[worker] if problem.has_offsets else None
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        own_rows = pl.ds(pl.multiple_of(worker * ROWS, ROWS), ROWS)
        for source, target in zip(queries, (query, query_sums), strict=True):
            if source is not None:
                plgpu.copy_gmem_to_smem(source.at[item, head, own_rows], target, queried)
        plgpu.barrier_wait(queried)

        def seen(start: jax.Array) -> jax.Array:
            shape = (ROWS, TILE)
            at = registers.iota(shape, 1) + start
            own = (
                (registers.iota(shape, 0) + worker * ROWS) >> (static.per_head.bit_length() - 1)
            ) + work.slot[item]
            mask = (at <= own) & (at < high)
            if work.lowest is None:
                return mask
            # Positions of a chunk are consecutive: the first query's tells those of all.
            lowest = own + (work.lowest[item] - work.slot[item])
            return mask & (at + key_position(item, start, shape) >= lowest)

        def attend_tile(t: jax.Array, carry: tuple) -> tuple:
            count, old_max, old_sum, acc = carry
            slot = rem(count, ring.stages)
            start = begin + t * TILE
            plgpu.barrier_wait(ring.fetched.at[slot])

            if not problem.is_quantised:

                @pl.when(high - start < TILE)
                def _() -> None:
                    pl.when(worker == 0)(
                        lambda: registers.clear_tail(ring.values.at[slot], high - start)
                    )
                    plgpu.barrier_arrive(cleared)
                    plgpu.barrier_wait(cleared)

            s = product(query, ring.keys.at[slot].transpose((1, 0)), (ROWS, TILE))
            if problem.is_quantised:
                scales = ring.scales.at[slot]
                s = products_with_keys(s, scales, query_sums, axis=1, registers=registers)
            s = jnp.where(seen(start), scaled(s, problem.scale, problem.softcap), MASKED)
            top = jnp.maximum(old_max, s.max(axis=1))
            shrink = jnp.exp2(old_max - top)
            p = jnp.exp2(s - down(top, TILE))
            total = old_sum * shrink + p.sum(axis=1)
            acc = acc * down(shrink, problem.head_dim)
            if problem.is_quantised:
                p, offset = weights_of_values(p, scales, axis=1, registers=registers)
                if offset is not None:
                    acc += down(offset.sum(axis=1), problem.head_dim)
            weights = scratch.weights.at[worker]
            acc = registers.accumulate(
                acc, p.astype(scratch.weights.dtype), ring.values.at[slot], weights
            )
            plgpu.barrier_arrive(ring.consumed.at[slot])
            return count + 1, top, total, acc

        none, worst = (registers.reduced(ROWS, value, axis=1) for value in (0.0, MASKED))
        begins = (count, worst, none, registers.full((ROWS, problem.head_dim), 0.0))
        count, top, total, acc = jax.lax.fori_loop(0, work.tiles[item], attend_tile, begins)
        found.out_IKRH.at[item, head, own_rows][...] = acc / down(total, problem.head_dim)
        if problem.sinks:
            scratch.top.at[worker][...] = top
            scratch.total.at[worker][...] = total
        plgpu.commit_smem()
        if problem.sinks:
            own_max, own_sum = (x.at[item, head, own_rows] for x in (found.max_IKR, found.sum_IKR))
            plgpu.copy_smem_to_gmem(scratch.top.at[worker], own_max)
            plgpu.copy_smem_to_gmem(scratch.total.at[worker], own_sum)
        return count

    @pl.when(worker == static.workers)
    def _() -> None:
        if static.workers > 1:
            plgpu.set_max_registers(FETCH_REGISTERS[problem.is_quantised], action="decrease")
        count = each_unit(work.num[0], problem.kv_heads, problem.num_processors, fetch_unit)
        pass_last(ring, scratch.arrivals, count, registers)

    @pl.when(worker < static.workers)
    def _() -> None:
        if static.workers > 1:
            plgpu.set_max_registers(ATTEND_REGISTERS[problem.is_quantised], action="increase")
        each_unit(work.num[0], problem.kv_heads, problem.num_processors, attend_unit)
        plgpu.wait_smem_to_gmem(0)


def prefill(
    queries: Queries,
    pools: Pools,
    items: PrefillItems,
    base: jax.Array,
    *,
    static: Static,
) -> Found:
    """Attends blocks of queries. queries: of [items, K, R = static.rows, H], row query * per_head
    + head. base [1]: the layer's first page.
    """
    problem, workers = static.problem, static.workers
    shape = (items.row.shape[0], problem.kv_heads, static.rows)
    softmax = jax.ShapeDtypeStruct(shape, jnp.float32) if problem.sinks else None
    staged = plgpu.SMEM((workers, ROWS), jnp.float32) if problem.sinks else None

    def matrices(columns: int) -> Any:
        return plgpu.SMEM(
            (workers, ROWS, columns),
            jnp.bfloat16,
            transforms=problem.tiled(jnp.bfloat16, columns),
        )

    ring, arrivals = ring_types(
        problem, stages=static.stages, arriving=static.arriving, num_readers=workers
    )
    sums = plgpu.SMEM((workers, ROWS), jnp.float32) if problem.has_offsets else None
    scratch = Scratch(
        queries=Queries(matrices(problem.head_dim), sums),
        ring=ring,
        arrivals=arrivals,
        weights=matrices(TILE),
        top=staged,
        total=staged,
        queried=plgpu.Barrier(num_arrivals=2 if problem.has_offsets else 1, num_barriers=workers),
        cleared=plgpu.Barrier(num_arrivals=workers),
    )
    work = Work(
        num=items.num,
        row=items.row,
        slot=items.slot,
        begin=items.begin,
        tiles=items.tiles,
        high=items.high,
        lowest=items.lowest,
        table=items.table,
        first=items.first,
    )
    out = jax.ShapeDtypeStruct((*shape, problem.head_dim), jnp.float32)
    (found,) = plgpu.kernel(
        partial(_kernel, static, items.width),
        out_type=[Found(out, softmax, softmax)],
        grid=(problem.num_processors,),
        grid_names=("block",),
        num_threads=workers + 1,
        thread_name="group",
        scratch_types=[scratch],
        interpret=problem.interpret,
    )(work, base, queries, pools)
    return found
