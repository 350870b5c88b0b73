"""Paged decode attention for Hopper: one query per row, the keys and values of all its slots in their pages already.

A persistent grid: as many blocks as there are processors, each with one or two pairs of warpgroups. One of a pair
reads page ids and has the pages fetched (TMA) into a ring of tiles in shared memory, the other attends them, item after
item of a list that is made once per step. Keys are the rows of the score matmul and head_dim those of the value matmul,
with all query heads of a KV head as columns: wgmma has at least 64 rows but as few as 8 columns, so that next to
nothing is computed that is not needed. Each item leaves a partial softmax (arXiv 2205.14135, section 3.1); those of a
row are merged after the kernel (flash-decoding).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.gpu.block import MASKED, Registers, copy_tile, div, num_parts, product, rem, scaled, tiled
from kernels_pallas.gpu.schedule import TILE, DecodeItems, decode_streams

COLUMNS = 8
"""Columns of a wgmma come in multiples of this."""

RING_BYTES = 192 << 10
"""Of the 227 KiB of shared memory of a processor, for tiles."""

MAX_STAGES = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class Static:
    """What is known when compiling. per_head: query heads of a KV head, rounded up to COLUMNS; num_blocks: the grid."""

    kv_heads: int
    head_dim: int
    per_head: int
    page_size: int
    scale: float
    softcap: float | None
    statistics: bool
    num_blocks: int
    interpret: Any

    @property
    def streams(self) -> int:
        return decode_streams(self.head_dim)

    @property
    def stages(self) -> int:
        """Tiles in shared memory of each stream."""
        tile_bytes = 2 * TILE * self.head_dim * 2
        return min(MAX_STAGES, RING_BYTES // self.streams // tile_bytes)


class Partial(NamedTuple):
    """Of each item and KV head, [I, K, ...] float32: sums of weights and of weighted values (transposed), relative to
    the max of the scores in units of log 2; entropy None unless asked for."""

    out_IKHM: jax.Array
    max_IKM: jax.Array
    sum_IKM: jax.Array
    entropy_IKM: jax.Array | None


def across(x_M: jax.Array, rows: int) -> jax.Array:
    """[M] -> [rows, M]."""
    return jax.lax.broadcast_in_dim(x_M, (rows, x_M.shape[0]), [1])


def _kernel(static: Static, width: int, *refs: Any) -> None:
    num, row_I, begin_I, tiles_I, low_I, high_I, table, base, q_DKMH, pages = refs[:10]
    num_outputs = 4 if static.statistics else 3
    outputs, scratch = refs[10 : 10 + num_outputs], refs[10 + num_outputs :]
    queries, keys, values, weights, *staged, queried, fetched, consumed = scratch
    stages, streams, registers = static.stages, static.streams, Registers(static.interpret)

    group = jax.lax.axis_index("group")
    stream = rem(group, streams)
    first_unit = jax.lax.axis_index("block") * streams + stream
    step = jnp.int32(static.num_blocks * streams)
    # A unit is one KV head of an item.
    num_units = jnp.maximum(num[0] * static.kv_heads - first_unit + step - 1, 0) // step

    def unit_of(i: jax.Array) -> tuple[jax.Array, jax.Array]:
        unit = first_unit + i * step
        item = div(unit, static.kv_heads)
        return item, unit - item * static.kv_heads

    def slot_of(count: jax.Array) -> jax.Array:
        return stream * stages + rem(count, stages)

    def fetch_unit(i: jax.Array, count: jax.Array) -> jax.Array:
        item, head = unit_of(i)
        begin, high, first = begin_I[item], high_I[item], row_I[item] * width

        def fetch_tile(t: jax.Array, count: jax.Array) -> jax.Array:
            slot = slot_of(count)
            pl.when(count >= stages)(lambda: plgpu.barrier_wait(consumed.at[slot]))
            into: Any = {"keys": keys.at[slot], "values": values.at[slot], "arrives": fetched.at[slot]}
            copy_tile(pages, table, first, begin + t * TILE, high, base=base[0], head=head, **into)
            return count + 1

        return jax.lax.fori_loop(0, tiles_I[item], fetch_tile, count)

    def attend_unit(i: jax.Array, count: jax.Array) -> jax.Array:
        item, head = unit_of(i)
        begin, low, high = begin_I[item], low_I[item], high_I[item]
        query, weight = queries.at[stream], weights.at[stream]
        plgpu.copy_gmem_to_smem(q_DKMH.at[row_I[item], head], query, queried.at[stream])
        plgpu.barrier_wait(queried.at[stream])

        def attend_tile(t: jax.Array, carry: tuple) -> tuple:
            count, old_max, old_sum, old_entropy, acc = carry
            slot = slot_of(count)
            start = begin + t * TILE
            plgpu.barrier_wait(fetched.at[slot])
            registers.clear_tail(values.at[slot], high - start)
            s = product(keys.at[slot], query.transpose((1, 0)), (TILE, static.per_head))
            s = scaled(s, static.scale, static.softcap)
            at = registers.iota(s.shape, 0) + start
            s = jnp.where((at >= low) & (at < high), s, MASKED)
            top = jnp.maximum(old_max, s.max(axis=0))
            shrink = jnp.exp2(old_max - top)
            distance = s - across(top, TILE)
            p = jnp.exp2(distance)
            total = old_sum * shrink + p.sum(axis=0)
            entropy = old_entropy
            if static.statistics:
                entropy = shrink * (old_entropy + old_sum * (old_max - top)) + (p * distance).sum(axis=0)
            weight.transpose((1, 0))[...] = registers.transposed(p.astype(pages.dtype))
            plgpu.commit_smem()
            gained = product(values.at[slot].transpose((1, 0)), weight.transpose((1, 0)), (static.head_dim, s.shape[1]))
            plgpu.barrier_arrive(consumed.at[slot])
            return count + 1, top, total, entropy, acc * across(shrink, static.head_dim) + gained

        none, worst = (registers.reduced(static.per_head, value, axis=0) for value in (0.0, MASKED))
        begins = (count, worst, none, none, registers.full((static.head_dim, static.per_head), 0.0))
        count, *found = jax.lax.fori_loop(0, tiles_I[item], attend_tile, begins)
        top, total, entropy, acc = found
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for source, x in zip(staged, (acc, top, total, entropy), strict=False):
            source.at[stream][...] = x
        plgpu.commit_smem()
        for source, target in zip(staged, outputs, strict=True):
            plgpu.copy_smem_to_gmem(source.at[stream], target.at[item, head])
        return count

    @pl.when(group >= streams)
    def _() -> None:
        jax.lax.fori_loop(0, num_units, fetch_unit, jnp.int32(0))

    @pl.when(group < streams)
    def _() -> None:
        jax.lax.fori_loop(0, num_units, attend_unit, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)


def decode(q_DKMH: jax.Array, pages: jax.Array, items: DecodeItems, base: jax.Array, *, static: Static) -> Partial:
    """q: [rows, K, per_head, H] in the dtype of the pages [L*P, 2K, S, H]; base [1]: the layer's first page."""
    kv_heads, per_head, head_dim = static.kv_heads, static.per_head, static.head_dim
    num_items, streams = items.row.shape[0], static.streams
    dtype = pages.dtype
    transforms = tiled(dtype)
    shapes = [(head_dim, per_head), *[(per_head,)] * (3 if static.statistics else 2)]
    slots = streams * static.stages
    interpret = {"interpret": static.interpret} if static.interpret else {}
    found = plgpu.kernel(
        partial(_kernel, static, items.width),
        out_type=[jax.ShapeDtypeStruct((num_items, kv_heads, *shape), jnp.float32) for shape in shapes],
        grid=(static.num_blocks,),
        grid_names=("block",),
        num_threads=2 * streams,
        thread_name="group",
        scratch_types=[
            plgpu.SMEM((streams, per_head, head_dim), dtype, transforms=transforms),
            *[plgpu.SMEM((slots, TILE, head_dim), dtype, transforms=transforms)] * 2,
            plgpu.SMEM((streams, per_head, TILE), dtype, transforms=transforms),
            *[plgpu.SMEM((streams, *shape), jnp.float32) for shape in shapes],
            plgpu.Barrier(num_barriers=streams),
            plgpu.Barrier(num_arrivals=2 * num_parts(static.page_size), num_barriers=slots),
            plgpu.Barrier(num_barriers=slots),
        ],
        **interpret,
    )(items.num, items.row, items.begin, items.tiles, items.low, items.high, items.table, base, q_DKMH, pages)
    out, top, total, *entropy = found
    return Partial(out, top, total, entropy[0] if entropy else None)
