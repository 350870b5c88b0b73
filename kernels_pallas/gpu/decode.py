"""Paged decode attention for Hopper: one query per row, the keys and values of all its slots in
their pages already.

A persistent grid of blocks that stay on their processor, one or two on each. Of a block's two
warpgroups one reads page ids and has the pages fetched (TMA) into a ring of tiles in shared memory,
the other attends them, item after item of a list that is made once per step. (Two that attend in
one block would be wrong: maxima over the rows of a matmul's result cross warps, through a piece of
shared memory that a block has once.) Keys are the rows of the score matmul and head_dim those of
the value matmul, with all query heads of a KV head as columns: wgmma has at least 64 rows but as
few as 8 columns, so that next to nothing is computed that is not needed. Each item leaves a partial
softmax (arXiv 2205.14135, section 3.1); those of a row are merged after the kernel
(flash-decoding). Quantised tiles arrive in a ring of their own, from which the fetching warpgroup
fills the other one: their numbers as bfloat16 and, beside them, their scales, which act on rows of
scores and of weights, and their offsets, which act on sums of queries and of weights.
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
    SUMS,
    Arrivals,
    Pools,
    Problem,
    Queries,
    Registers,
    Ring,
    each_unit,
    fetch_tiles,
    pass_last,
    product,
    products_with_keys,
    rem,
    ring_bytes,
    ring_types,
    scaled,
    weights_of_values,
)
from kernels_pallas.gpu.schedule import TILE, DecodeItems

COLUMNS = 8
"""Columns of a wgmma come in multiples of this."""

SHARED_BYTES = 226 << 10
"""A processor's shared memory for the blocks on it is 227 KiB, and each takes 1 KiB for itself."""

MOST_FOR_TWO = 112 << 10
"""One block takes at most this where two are to fit."""

SMALL_BYTES = 4 << 10
"""Barriers, and what maxima and sums across warps go through."""

MIN_STAGES, MAX_STAGES = 2, 6


@dataclass(frozen=True, kw_only=True, slots=True)
class Static:
    """Holds what is known when compiling. per_head: query heads of a KV head, rounded up to
    COLUMNS.

    Raises: NotImplementedError if so many heads leave no room for tiles.
    """

    problem: Problem
    per_head: int

    def __post_init__(self) -> None:
        if (self.arriving if self.problem.is_quantised else self.stages) < MIN_STAGES:
            heads = f"{self.per_head} query heads of {self.problem.head_dim} per KV head"
            raise NotImplementedError(
                f"heads: {heads} leave no room for tiles in {SHARED_BYTES} bytes"
            )

    @property
    def other_bytes(self) -> int:
        """Counts queries and their sums, weights and the result."""
        head_dim = self.problem.head_dim
        sums = 4 * (-(-self.per_head // SUMS) * SUMS) if self.problem.has_offsets else 0
        of_head = 2 * head_dim + 2 * TILE + 4 * head_dim + 4 * 3
        return self.per_head * of_head + sums + SMALL_BYTES

    @property
    def per_processor(self) -> int:
        """Counts blocks: two where that leaves each three tiles, so that one's matmuls run beside
        the other's softmax.
        """
        tile, arrival = ring_bytes(self.problem)
        quantised = QUANTISED_STAGES * tile + MIN_STAGES * arrival
        wanted = quantised if self.problem.is_quantised else 3 * tile
        return 2 if self.other_bytes + wanted <= MOST_FOR_TWO else 1

    @property
    def tile_bytes(self) -> int:
        """Says what is left for the tiles of one block."""
        return (MOST_FOR_TWO if self.per_processor == 2 else SHARED_BYTES) - self.other_bytes

    @property
    def stages(self) -> int:
        """Counts tiles in shared memory."""
        tile, _ = ring_bytes(self.problem)
        most = min(MAX_STAGES, self.tile_bytes // tile)
        return QUANTISED_STAGES if self.problem.is_quantised else most

    @property
    def arriving(self) -> int:
        """Counts quantised tiles in shared memory."""
        if not self.problem.is_quantised:
            return 0
        tile, arrival = ring_bytes(self.problem)
        return min(MAX_STAGES, (self.tile_bytes - QUANTISED_STAGES * tile) // arrival)

    @property
    def num_blocks(self) -> int:
        return self.problem.num_processors * self.per_processor


class Partial(NamedTuple):
    """Holds the softmax of each item and KV head, [I, K, ...] float32: sums of weighted values
    (transposed), the max of the scores in units of log 2, and sums of weights, relative to that
    max. In the kernel: references to them, or to one item's in shared memory.
    """

    out_IKHM: Any
    max_IKM: Any
    sum_IKM: Any


class Scratch(NamedTuple):
    """Holds a block's shared memory and the barrier of its query. staged: an item's results on
    their way out.
    """

    query: Queries
    ring: Ring
    arrivals: Arrivals | None
    weight: Any
    staged: Partial
    queried: Any


def across(x_M: jax.Array, rows: int) -> jax.Array:
    """Repeats [M] as [rows, M]."""
    return jax.lax.broadcast_in_dim(x_M, (rows, x_M.shape[0]), [1])


def _kernel(
    static: Static,
    items: DecodeItems,
    base: Any,
    queries: Queries,
    pools: Pools,
    found: Partial,
    scratch: Scratch,
) -> None:
    problem, per_head = static.problem, static.per_head
    ring, weight, queried = scratch.ring, scratch.weight, scratch.queried
    query = scratch.query.vectors
    query_sums = scratch.query.sums.at[pl.ds(0, per_head)] if problem.has_offsets else None
    registers = Registers(problem.interpret)

    def fetch_unit(item: jax.Array, head: jax.Array, count: jax.Array) -> jax.Array:
        return fetch_tiles(
            ring,
            scratch.arrivals,
            pools,
            items.table,
            begin=items.begin[item],
            high=items.high[item],
            num_tiles=items.tiles[item],
            row=items.row[item] * items.width,
            base=base[0],
            head=head,
            count=count,
            registers=registers,
        )

    def attend_unit(item: jax.Array, head: jax.Array, count: jax.Array) -> jax.Array:
        begin, low, high = items.begin[item], items.low[item], items.high[item]
        for source, target in zip(queries, scratch.query, strict=True):
            if source is not None:
                plgpu.copy_gmem_to_smem(source.at[items.row[item], head], target, queried)
        plgpu.barrier_wait(queried)

        def attend_tile(t: jax.Array, carry: tuple) -> tuple:
            # Sums over keys are per row of a tile until the end: each would cross warps.
            count, old_max, sum_TM, offset_TM, acc = carry
            slot = rem(count, ring.stages)
            start = begin + t * TILE
            plgpu.barrier_wait(ring.fetched.at[slot])
            if not problem.is_quantised:
                registers.clear_tail(ring.values.at[slot], high - start)
            s = product(ring.keys.at[slot], query.transpose((1, 0)), (TILE, per_head))
            if problem.is_quantised:
                scales = ring.scales.at[slot]
                s = products_with_keys(s, scales, query_sums, axis=0, registers=registers)
            s = scaled(s, problem.scale, problem.softcap)
            at = registers.iota(s.shape, 0) + start
            s = jnp.where((at >= low) & (at < high), s, MASKED)
            top = jnp.maximum(old_max, s.max(axis=0))
            shrink = jnp.exp2(old_max - top)
            p = jnp.exp2(s - across(top, TILE))
            sum_TM = sum_TM * across(shrink, TILE) + p
            if problem.is_quantised:
                p, offset = weights_of_values(p, scales, axis=0, registers=registers)
                if offset is not None:
                    offset_TM = offset_TM * across(shrink, TILE) + offset
            weight.transpose((1, 0))[...] = registers.transposed(p.astype(weight.dtype))
            plgpu.commit_smem()
            values = ring.values.at[slot].transpose((1, 0))
            gained = product(values, weight.transpose((1, 0)), (problem.head_dim, s.shape[1]))
            plgpu.barrier_arrive(ring.consumed.at[slot])
            acc = acc * across(shrink, problem.head_dim) + gained
            return count + 1, top, sum_TM, offset_TM, acc

        begins = (
            count,
            registers.reduced(per_head, MASKED, axis=0),
            registers.full((TILE, per_head), 0.0),
            registers.full((TILE, per_head), 0.0) if problem.has_offsets else None,
            registers.full((problem.head_dim, per_head), 0.0),
        )
        count, top, sum_TM, offset_TM, acc = jax.lax.fori_loop(
            0, items.tiles[item], attend_tile, begins
        )
        if offset_TM is not None:
            acc += across(offset_TM.sum(axis=0), problem.head_dim)
        done = Partial(acc, top, sum_TM.sum(axis=0))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for source, x in zip(scratch.staged, done, strict=True):
            source[...] = x
        plgpu.commit_smem()
        for source, target in zip(scratch.staged, found, strict=True):
            plgpu.copy_smem_to_gmem(source, target.at[item, head])
        return count

    group = jax.lax.axis_index("group")

    @pl.when(group == 1)
    def _() -> None:
        count = each_unit(items.num[0], problem.kv_heads, static.num_blocks, fetch_unit)
        pass_last(ring, scratch.arrivals, count, registers)

    @pl.when(group == 0)
    def _() -> None:
        each_unit(items.num[0], problem.kv_heads, static.num_blocks, attend_unit)
        plgpu.wait_smem_to_gmem(0)


def decode(
    queries: Queries,
    pools: Pools,
    items: DecodeItems,
    base: jax.Array,
    *,
    static: Static,
) -> Partial:
    """Attends one query per row. queries: of [rows, K, per_head, H]; base [1]: the layer's first
    page.
    """
    problem, per_head, head_dim = static.problem, static.per_head, static.problem.head_dim
    each = (items.row.shape[0], problem.kv_heads)
    shapes = Partial((head_dim, per_head), (per_head,), (per_head,))

    def matrix(columns: int) -> Any:
        return plgpu.SMEM(
            (per_head, columns), jnp.bfloat16, transforms=problem.tiled(jnp.bfloat16, columns)
        )

    ring, arrivals = ring_types(
        problem, stages=static.stages, arriving=static.arriving, num_readers=1
    )
    sums = None
    if queries.sums is not None:
        sums = plgpu.SMEM(queries.sums.shape[2:], jnp.float32)
    scratch = Scratch(
        query=Queries(matrix(head_dim), sums),
        ring=ring,
        arrivals=arrivals,
        weight=matrix(TILE),
        staged=Partial(*(plgpu.SMEM(shape, jnp.float32) for shape in shapes)),
        queried=plgpu.Barrier(num_arrivals=2 if problem.has_offsets else 1),
    )
    out = Partial(*(jax.ShapeDtypeStruct((*each, *shape), jnp.float32) for shape in shapes))
    (found,) = plgpu.kernel(
        partial(_kernel, static),
        out_type=[out],
        grid=(static.num_blocks,),
        grid_names=("block",),
        num_threads=2,
        thread_name="group",
        scratch_types=[scratch],
        interpret=problem.interpret,
    )(items, base, queries, pools)
    return found
