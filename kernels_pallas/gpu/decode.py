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
(flash-decoding). int8 tiles arrive in a ring of their own,
from which the fetching warpgroup fills the other one: their numbers as bfloat16 and, beside them,
their scales, which act on rows of scores and of weights.
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
from kernels_pallas.gpu.schedule import TILE, DecodeItems

COLUMNS = 8
"""Columns of a wgmma come in multiples of this."""

SHARED_BYTES = 226 << 10
"""Of a processor's shared memory, for the blocks on it: 227 KiB, and each takes 1 KiB for
itself.
"""

MOST_FOR_TWO = 112 << 10
"""Of one block, where two are to fit."""

SMALL_BYTES = 4 << 10
"""Barriers, and what maxima and sums across warps go through."""

MIN_STAGES, MAX_STAGES = 2, 6

INT8_STAGES = 2
"""Of tiles as matmuls take them, where int8 ones wait in stages of their own: one is attended, one
filled.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Static:
    """What is known when compiling. per_head: query heads of a KV head, rounded up to COLUMNS.

    Raises: NotImplementedError if so many heads leave no room for tiles.
    """

    kv_heads: int
    head_dim: int
    per_head: int
    page_size: int
    int8: bool
    scale: float
    softcap: float | None
    statistics: bool
    page_mass: bool
    num_processors: int
    interpret: Any

    def __post_init__(self) -> None:
        if (self.arriving if self.int8 else self.stages) < MIN_STAGES:
            heads = f"{self.per_head} query heads of {self.head_dim} per KV head"
            raise NotImplementedError(
                f"heads: {heads} leave no room for tiles in {SHARED_BYTES} bytes"
            )

    @property
    def other_bytes(self) -> int:
        """Queries, weights, result."""
        numbers = 3 + (1 + num_parts(self.page_size) if self.page_mass else 0)
        return (
            self.per_head * (2 * self.head_dim + 2 * TILE + 4 * self.head_dim + 4 * numbers)
            + SMALL_BYTES
        )

    @property
    def per_processor(self) -> int:
        """Blocks: two where that leaves each three tiles, so that one's matmuls run beside the
        other's softmax.
        """
        tile, arrival = ring_bytes(self.head_dim, int8=self.int8)
        wanted = INT8_STAGES * tile + MIN_STAGES * arrival if self.int8 else 3 * tile
        return 2 if self.other_bytes + wanted <= MOST_FOR_TWO else 1

    @property
    def tile_bytes(self) -> int:
        """For tiles, of one block."""
        return (MOST_FOR_TWO if self.per_processor == 2 else SHARED_BYTES) - self.other_bytes

    @property
    def stages(self) -> int:
        """Tiles in shared memory."""
        tile, _ = ring_bytes(self.head_dim, int8=self.int8)
        return INT8_STAGES if self.int8 else min(MAX_STAGES, self.tile_bytes // tile)

    @property
    def arriving(self) -> int:
        """int8 tiles in shared memory."""
        tile, arrival = ring_bytes(self.head_dim, int8=self.int8)
        return (
            min(MAX_STAGES, (self.tile_bytes - INT8_STAGES * tile) // arrival) if self.int8 else 0
        )

    @property
    def num_blocks(self) -> int:
        return self.num_processors * self.per_processor


class Partial(NamedTuple):
    """Of each item and KV head, [I, K, ...] float32: sums of weights and of weighted values
    (transposed), relative to the max of the scores in units of log 2; entropy None unless asked
    for.

    mass [rows, K, tiles of a row, num_parts + 1, M]: sums of weights of each page of a tile,
    relative to the max that its item had come to, which comes last; garbage for tiles of no item.
    None unless asked for.
    """

    out_IKHM: jax.Array
    max_IKM: jax.Array
    sum_IKM: jax.Array
    entropy_IKM: jax.Array | None
    mass_DKtPM: jax.Array | None


def across(x_M: jax.Array, rows: int) -> jax.Array:
    """[M] -> [rows, M]."""
    return jax.lax.broadcast_in_dim(x_M, (rows, x_M.shape[0]), [1])


def _kernel(static: Static, width: int, *refs: Any) -> None:
    num, row_I, begin_I, tiles_I, low_I, high_I, table, base, q_DKMH = refs[:9]
    *pools, rest = (*refs[9 : 10 + static.int8], refs[10 + static.int8 :])
    num_outputs = (4 if static.statistics else 3) + static.page_mass
    outputs, (query, ring, arrivals, weight, *staged, queried) = (
        rest[:num_outputs],
        rest[num_outputs:],
    )
    if static.page_mass:
        outputs, mass_DKtPM, masses = outputs[:-1], outputs[-1], staged.pop()
    registers = Registers(static.interpret)

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

    def stage_masses(p: jax.Array, top: jax.Array) -> None:
        """Each page's sum crosses warps, as the max does: float32, where a matmul would round the
        weights.
        """
        parts = num_parts(static.page_size)
        page = div(registers.iota(p.shape, 0), TILE // parts)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for part in range(parts):
            masses.at[part][...] = (p if parts == 1 else jnp.where(page == part, p, 0.0)).sum(
                axis=0
            )
        masses.at[parts][...] = top

    def attend_unit(item: jax.Array, head: jax.Array, count: jax.Array) -> jax.Array:
        begin, low, high = begin_I[item], low_I[item], high_I[item]
        plgpu.copy_gmem_to_smem(q_DKMH.at[row_I[item], head], query, queried)
        plgpu.barrier_wait(queried)

        def attend_tile(t: jax.Array, carry: tuple) -> tuple:
            # Sums over keys are per row of a tile until the end: each would cross warps.
            count, old_max, sum_TM, entropy_TM, acc = carry
            slot = rem(count, ring.stages)
            start = begin + t * TILE
            plgpu.barrier_wait(ring.fetched.at[slot])
            if not static.int8:
                registers.clear_tail(ring.values.at[slot], high - start)
            s = product(ring.keys.at[slot], query.transpose((1, 0)), (TILE, static.per_head))
            if static.int8:
                s *= registers.scales(ring.scales.at[slot, 0], 0, s.shape)
            s = scaled(s, static.scale, static.softcap)
            at = registers.iota(s.shape, 0) + start
            s = jnp.where((at >= low) & (at < high), s, MASKED)
            top = jnp.maximum(old_max, s.max(axis=0))
            shrink = jnp.exp2(old_max - top)
            distance = s - across(top, TILE)
            p = jnp.exp2(distance)
            if static.statistics:
                moved = entropy_TM + sum_TM * across(old_max - top, TILE)
                entropy_TM = across(shrink, TILE) * moved + p * distance
            sum_TM = sum_TM * across(shrink, TILE) + p
            if static.page_mass:
                stage_masses(p, top)
            if static.int8:
                # The scale of a slot that no one owns may be NaN.
                p = jnp.where(p > 0, p * registers.scales(ring.scales.at[slot, 1], 0, s.shape), 0.0)
            weight.transpose((1, 0))[...] = registers.transposed(p.astype(weight.dtype))
            plgpu.commit_smem()
            if static.page_mass:
                plgpu.copy_smem_to_gmem(masses, mass_DKtPM.at[row_I[item], head, div(start, TILE)])
            values = ring.values.at[slot].transpose((1, 0))
            gained = product(values, weight.transpose((1, 0)), (static.head_dim, s.shape[1]))
            plgpu.barrier_arrive(ring.consumed.at[slot])
            return (
                count + 1,
                top,
                sum_TM,
                entropy_TM,
                acc * across(shrink, static.head_dim) + gained,
            )

        worst = registers.reduced(static.per_head, MASKED, axis=0)
        zeros = (
            registers.full((rows, static.per_head), 0.0) for rows in (TILE, TILE, static.head_dim)
        )
        count, top, sum_TM, entropy_TM, acc = jax.lax.fori_loop(
            0, tiles_I[item], attend_tile, (count, worst, *zeros)
        )
        found = [acc, top, sum_TM.sum(axis=0)]
        if static.statistics:
            found.append(entropy_TM.sum(axis=0))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for source, x in zip(staged, found, strict=True):
            source[...] = x
        plgpu.commit_smem()
        for source, target in zip(staged, outputs, strict=True):
            plgpu.copy_smem_to_gmem(source, target.at[item, head])
        return count

    group = jax.lax.axis_index("group")

    @pl.when(group == 1)
    def _() -> None:
        pass_last(
            ring,
            arrivals,
            each_unit(num[0], static.kv_heads, static.num_blocks, fetch_unit),
            registers,
        )

    @pl.when(group == 0)
    def _() -> None:
        each_unit(num[0], static.kv_heads, static.num_blocks, attend_unit)
        plgpu.wait_smem_to_gmem(0)


def decode(
    q_DKMH: jax.Array,
    pools: tuple[jax.Array, ...],
    items: DecodeItems,
    base: jax.Array,
    *,
    static: Static,
) -> Partial:
    """q: [rows, K, per_head, H] bfloat16; pools: pages [L*P, 2K, S, H] bfloat16, or int8 and their
    scales [L*P, 2K, S] bfloat16; base [1]: the layer's first page.
    """
    kv_heads, per_head, head_dim = static.kv_heads, static.per_head, static.head_dim
    num_items = items.row.shape[0]
    shapes = [(head_dim, per_head), *[(per_head,)] * (3 if static.statistics else 2)]
    outs = [(num_items, kv_heads, *shape) for shape in shapes]
    if static.page_mass:
        shapes.append((num_parts(static.page_size) + 1, per_head))
        num_tiles = -(-items.width * static.page_size // TILE)
        outs.append((q_DKMH.shape[0], kv_heads, num_tiles, *shapes[-1]))
    sizes: Any = {"head_dim": head_dim, "page_size": static.page_size, "num_readers": 1}

    def matrix(columns: int) -> Any:
        return plgpu.SMEM(
            (per_head, columns), jnp.bfloat16, transforms=tiled(jnp.bfloat16, columns)
        )

    interpret = {"interpret": static.interpret} if static.interpret else {}
    found = plgpu.kernel(
        partial(_kernel, static, items.width),
        out_type=[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in outs],
        grid=(static.num_blocks,),
        grid_names=("block",),
        num_threads=2,
        thread_name="group",
        scratch_types=[
            matrix(head_dim),
            *ring_types(stages=static.stages, arriving=static.arriving, **sizes),
            matrix(TILE),
            *[plgpu.SMEM(shape, jnp.float32) for shape in shapes],
            plgpu.Barrier(),
        ],
        **interpret,
    )(
        items.num,
        items.row,
        items.begin,
        items.tiles,
        items.low,
        items.high,
        items.table,
        base,
        q_DKMH,
        *pools,
    )
    mass = found.pop() if static.page_mass else None
    out, top, total, *entropy = found
    return Partial(out, top, total, entropy[0] if entropy else None, mass)
