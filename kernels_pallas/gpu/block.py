"""What the attention kernels share: tiles of keys and values on their way, matmuls, and what registers look like."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.gpu.schedule import TILE

LOG2E = math.log2(math.e)
MASKED = -1e30
"""Score of a slot that is not seen: finite, so that its distance from another one is no NaN."""

SWIZZLE = 128
"""Bytes of a row of shared memory that are permuted so that matmuls and copies meet no bank conflicts."""


def tiled(dtype: Any) -> tuple[Any, Any]:
    """How shared memory has to hold what matmuls take."""
    return plgpu.TilingTransform((8, SWIZZLE // jnp.dtype(dtype).itemsize)), plgpu.SwizzleTransform(SWIZZLE)


def div(a: jax.Array, b: int) -> jax.Array:
    """Of numbers that are not negative; `//` also handles the others."""
    return jax.lax.div(a, jnp.int32(b))


def rem(a: jax.Array, b: int) -> jax.Array:
    return jax.lax.rem(a, jnp.int32(b))


def num_parts(page_size: int) -> int:
    """Pages of a tile, or 1 where a page has several tiles."""
    return max(1, TILE // page_size)


def copy_tile(
    pages: Any,
    table: Any,
    row: jax.Array,
    start: jax.Array,
    high: jax.Array,
    *,
    base: jax.Array,
    head: jax.Array,
    keys: Any,
    values: Any,
    arrives: Any,
) -> None:
    """Starts copying the tile of a row's slots from `start` on, 2 * num_parts copies in all.

    table: flat, the row's pages from index `row` on; high: the end of its slots, at least start + 1; base: the layer's
    first page.
    """
    size, kv_heads = pages.shape[2], pages.shape[1] // 2
    length = min(size, TILE)
    for part in range(num_parts(size)):
        # Past the row's end its last page once more: how many copies come must be known when compiling.
        index = jnp.minimum(div(start, size) + part, div(high - 1, size))
        page = base + table[row + index]
        inside = pl.ds(0, size) if size <= TILE else pl.ds(pl.multiple_of(rem(start, size), TILE), TILE)
        for heads, tile in ((head, keys), (head + kv_heads, values)):
            plgpu.copy_gmem_to_smem(pages.at[page, heads, inside], tile.at[pl.ds(part * length, length)], arrives)


class Ring(NamedTuple):
    """Tiles of keys and values in shared memory, [stages, TILE, H] each: one warpgroup has them fetched, others read
    them. fetched, consumed: barriers of each stage."""

    keys: Any
    values: Any
    fetched: Any
    consumed: Any

    @property
    def stages(self) -> int:
        return self.keys.shape[0]


def each_unit(
    num_items: jax.Array, kv_heads: int, num_blocks: int, work: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
) -> None:
    """work(item, head, count) for every unit, one KV head of an item, that falls to this block of a persistent grid. It
    returns `count`, the tiles that went through the ring so far."""
    first, step = jax.lax.axis_index("block"), jnp.int32(num_blocks)
    num_units = jnp.maximum(num_items * kv_heads - first + step - 1, 0) // step

    def run(i: jax.Array, count: jax.Array) -> jax.Array:
        unit = first + i * step
        item = div(unit, kv_heads)
        return work(item, unit - item * kv_heads, count)

    jax.lax.fori_loop(0, num_units, run, jnp.int32(0))


def fetch_tiles(
    ring: Ring, pages: Any, table: Any, *, row: jax.Array, begin: jax.Array, high: jax.Array, num_tiles: jax.Array,
    base: jax.Array, head: jax.Array, count: jax.Array,
) -> jax.Array:  # fmt: skip
    """Has the tiles of a unit fetched, from slot `begin` of its row on, as stages of the ring become free. See
    `copy_tile`; returns the count after them."""

    def fetch_tile(t: jax.Array, count: jax.Array) -> jax.Array:
        slot = rem(count, ring.stages)
        pl.when(count >= ring.stages)(lambda: plgpu.barrier_wait(ring.consumed.at[slot]))
        into: Any = {"keys": ring.keys.at[slot], "values": ring.values.at[slot], "arrives": ring.fetched.at[slot]}
        copy_tile(pages, table, row, begin + t * TILE, high, base=base, head=head, **into)
        return count + 1

    return jax.lax.fori_loop(0, num_tiles, fetch_tile, count)


def product(a: Any, b: Any, shape: tuple[int, int]) -> jax.Array:
    """[M, N] float32 of references a [M, K] and b [K, N] to shared memory."""

    def run(acc: Any) -> jax.Array:
        plgpu.wgmma(acc, a, b)
        return acc[...]

    return pl.run_scoped(run, plgpu.ACC(shape, jnp.float32))


class Registers:
    """Arrays as a warpgroup holds the result of a matmul. The interpreter has no registers."""

    def __init__(self, interpret: Any) -> None:
        self._plain = bool(interpret)

    def iota(self, shape: tuple[int, ...], axis: int) -> jax.Array:
        if self._plain:
            return jax.lax.broadcasted_iota(jnp.int32, shape, axis)
        return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA)

    def full(self, shape: tuple[int, int], value: float) -> jax.Array:
        return self._cast(jnp.full(shape, value, jnp.float32), plgpu.Layout.WGMMA)

    def reduced(self, length: int, value: float, axis: int) -> jax.Array:
        """As a sum over `axis`."""
        return self._cast(jnp.full((length,), value, jnp.float32), plgpu.Layout.WGMMA.reduce(axis))

    def transposed(self, x: jax.Array) -> jax.Array:
        """Ready to be stored to a transposed reference."""
        return self._cast(x, plgpu.Layout.WGMMA_TRANSPOSED)

    def _cast(self, x: jax.Array, layout: Any) -> jax.Array:
        return x if self._plain else plgpu.layout_cast(x, layout)

    def accumulate(self, acc: jax.Array, a: jax.Array, b: Any, staged: Any) -> jax.Array:
        """acc + a @ b, a from registers and no registers for the product. The interpreter knows no such matmul: there
        `staged`, shared memory as large as a, takes it."""
        if self._plain:
            staged[...] = a
            return acc + product(staged, b, (acc.shape[0], acc.shape[1]))
        return pl.run_state(lambda ref: plgpu.wgmma(ref, a, b))(plgpu.ACC.init(acc))

    def clear_tail(self, tile: Any, left: jax.Array) -> None:
        """Zeros in the rows of a tile from `left` on. What no one owns may be NaN, and 0 x NaN is NaN: a weight of zero
        does not clear a value."""

        @pl.when(left < TILE)
        def _() -> None:
            held = tile[...]
            tile[...] = jnp.where(self.iota(held.shape, 0) < left, held, jnp.zeros_like(held))
            plgpu.commit_smem()


def scaled(s: jax.Array, scale: float, softcap: float | None) -> jax.Array:
    """Scores times log2(e), capped where that is wanted. exp2 is one operation less than exp."""
    if softcap is None:
        return s * (scale * LOG2E)
    return jnp.tanh(s * (scale / softcap)) * (softcap * LOG2E)
