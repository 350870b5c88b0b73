"""Holds what the attention kernels share: tiles of keys and values on their way, matmuls, and how
registers look.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.gpu.pages import unpack_scales
from kernels_pallas.gpu.schedule import TILE

LOG2E = math.log2(math.e)
MASKED = -1e30
"""Score of a slot that is not seen: finite, so that its distance from another one is no NaN."""

SWIZZLE = 128
"""See `Problem.swizzle`."""

QUANTISED_STAGES = 2
"""Tiles as matmuls take them have so many where quantised ones wait in stages of their own: one is
attended, one filled.
"""

SUMS = 32
"""Sums of queries that are copied come in multiples of this: jax 0.10 copies 128 bytes at least."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """Holds what both kernels are compiled for. sinks: the softmax's max and sum are wanted too."""

    kv_heads: int
    head_dim: int
    page_size: int
    num_bits: int
    scale: float
    softcap: float | None
    sinks: bool
    num_processors: int
    interpret: Any

    @property
    def is_quantised(self) -> bool:
        return self.num_bits < 16

    @property
    def has_offsets(self) -> bool:
        return self.num_bits == 4

    @property
    def row_bytes(self) -> int:
        """Counts the bytes of a quantised key or value."""
        return self.head_dim * self.num_bits // 8

    @property
    def num_scales(self) -> int:
        """Counts the scales and offsets of a slot, those of its key and of its value."""
        return 4 if self.has_offsets else 2

    @property
    def scale_dtype(self) -> Any:
        return jnp.int32 if self.has_offsets else jnp.bfloat16

    @property
    def swizzle(self) -> int:
        """Returns bytes of a row of shared memory that are permuted so that matmuls and copies meet
        no bank conflicts. One half of a vector must not begin in the middle of them where each is
        put there by itself.
        """
        return min(SWIZZLE, self.head_dim) if self.has_offsets else SWIZZLE

    def tiled(self, dtype: Any, columns: int) -> tuple[Any, Any]:
        """Says how shared memory has to hold what matmuls take."""
        itemsize = jnp.dtype(dtype).itemsize
        swizzle = min(self.swizzle, columns * itemsize)
        return plgpu.TilingTransform((8, swizzle // itemsize)), plgpu.SwizzleTransform(swizzle)


class Pools(NamedTuple):
    """Holds pages [L*P, 2K, S, H] bfloat16, or the numbers and scales of `QuantisedPages`, the
    latter as [L*P, 2K, S]; in a kernel references to them.
    """

    pages: Any
    scales: Any


def div(a: jax.Array, b: int) -> jax.Array:
    """Divides numbers that are not negative; `//` also handles the others."""
    return jax.lax.div(a, jnp.int32(b))


def rem(a: jax.Array, b: int) -> jax.Array:
    return jax.lax.rem(a, jnp.int32(b))


def num_parts(page_size: int) -> int:
    """Counts the pages of a tile, 1 where a page has several tiles."""
    return max(1, TILE // page_size)


class Queries(NamedTuple):
    """Holds queries [.., M, H] bfloat16 and, where keys have offsets, the sums of each [.., M]
    float32, M rounded up to SUMS, else None. In a kernel: references to them.
    """

    vectors: Any
    sums: Any


class Ring(NamedTuple):
    """Holds tiles of keys and values in shared memory, [stages, TILE, H] bfloat16 each: one
    warpgroup has them fetched, others read them. scales float32, of keys and values that are
    numbers, else None: [stages, 2, TILE], or [stages, 4, TILE] with the offsets of both behind.
    fetched, consumed: barriers of each stage.
    """

    keys: Any
    values: Any
    scales: Any
    fetched: Any
    consumed: Any

    @property
    def stages(self) -> int:
        return self.keys.shape[0]


class Arrivals(NamedTuple):
    """Holds tiles of quantised keys and values as in their pages, on their way into a ring:
    [stages, TILE, H or H/2] int8 each, their scales [stages, 2, TILE], and a barrier of each stage.
    """

    keys: Any
    values: Any
    scales: Any
    arrived: Any

    @property
    def stages(self) -> int:
        return self.keys.shape[0]


def ring_types(
    problem: Problem, *, stages: int, arriving: int, num_readers: int
) -> tuple[Ring, Arrivals | None]:
    """Makes what a kernel asks for. arriving: stages of quantised tiles, 0 where the pages hold
    bfloat16.
    """

    def tiles(num: int, dtype: Any, columns: int) -> Any:
        return plgpu.SMEM((num, TILE, columns), dtype, transforms=problem.tiled(dtype, columns))

    num_copies = (4 if arriving else 2) * num_parts(problem.page_size)
    keys, values = (tiles(stages, jnp.bfloat16, problem.head_dim) for _ in range(2))
    scales = plgpu.SMEM((stages, problem.num_scales, TILE), jnp.float32) if arriving else None
    fetched = plgpu.Barrier(num_arrivals=1 if arriving else num_copies, num_barriers=stages)
    consumed = plgpu.Barrier(num_arrivals=num_readers, num_barriers=stages)
    ring = Ring(keys, values, scales, fetched, consumed)
    if not arriving:
        return ring, None
    keys, values = (tiles(arriving, jnp.int8, problem.row_bytes) for _ in range(2))
    scales = plgpu.SMEM((arriving, 2, TILE), problem.scale_dtype)
    arrived = plgpu.Barrier(num_arrivals=num_copies, num_barriers=arriving)
    return ring, Arrivals(keys, values, scales, arrived)


def ring_bytes(problem: Problem) -> tuple[int, int]:
    """Counts the bytes of a stage of the ring, and of one of the arrivals."""
    tile = 4 * TILE * problem.head_dim
    if not problem.is_quantised:
        return tile, 0
    scales = 2 * TILE * jnp.dtype(problem.scale_dtype).itemsize
    return tile + problem.num_scales * 4 * TILE, 2 * TILE * problem.row_bytes + scales


def copy_tile(
    pools: Pools,
    table: Any,
    row: jax.Array,
    start: jax.Array,
    high: jax.Array,
    *,
    base: jax.Array,
    head: jax.Array,
    tiles: tuple[Any, Any],
    scales: Any,
    arrives: Any,
) -> None:
    """Starts copying the tile of a row's slots from `start` on, 2 * num_parts copies in all, twice
    as many with scales.

    table: flat, the row's pages from index `row` on; high: the end of its slots, at least start +
    1; base: the layer's first page.
    """
    pages = pools.pages
    size, kv_heads = pages.shape[2], pages.shape[1] // 2
    length = min(size, TILE)
    for part in range(num_parts(size)):
        # Past the row's end its last page once more: how many copies come must be known when
        # compiling.
        index = jnp.minimum(div(start, size) + part, div(high - 1, size))
        page = base + table[row + index]
        inside = (
            pl.ds(0, size) if size <= TILE else pl.ds(pl.multiple_of(rem(start, size), TILE), TILE)
        )
        into = pl.ds(part * length, length)
        for i, tile in enumerate(tiles):
            of_head = head + i * kv_heads
            plgpu.copy_gmem_to_smem(pages.at[page, of_head, inside], tile.at[into], arrives)
            if scales is not None:
                plgpu.copy_gmem_to_smem(
                    pools.scales.at[page, of_head, inside], scales.at[i, into], arrives
                )


def each_unit(
    num_items: jax.Array,
    kv_heads: int,
    num_blocks: int,
    work: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],
) -> jax.Array:
    """Calls work(item, head, count) for every unit, one KV head of an item, that falls to this
    block of a persistent grid. It returns `count`, the tiles that went through the ring so far, and
    so does this.
    """
    first, step = jax.lax.axis_index("block"), jnp.int32(num_blocks)
    num_units = jnp.maximum(num_items * kv_heads - first + step - 1, 0) // step

    def run(i: jax.Array, count: jax.Array) -> jax.Array:
        unit = first + i * step
        item = div(unit, kv_heads)
        return work(item, unit - item * kv_heads, count)

    return jax.lax.fori_loop(0, num_units, run, jnp.int32(0))


def fetch_tiles(
    ring: Ring,
    arrivals: Arrivals | None,
    pools: Pools,
    table: Any,
    *,
    row: jax.Array,
    begin: jax.Array,
    high: jax.Array,
    num_tiles: jax.Array,
    base: jax.Array,
    head: jax.Array,
    count: jax.Array,
    registers: Registers,
) -> jax.Array:
    """Has the tiles of a unit fetched, from slot `begin` of its row on, as stages of the ring
    become free. See `copy_tile`; returns the count after them. Quantised tiles are passed on while
    later ones, of this unit or the next, are on their way: `pass_last` is for those that none
    follow.
    """

    def fetch_tile(t: jax.Array, count: jax.Array) -> jax.Array:
        copy = partial(copy_tile, pools, table, row, begin + t * TILE, high, base=base, head=head)
        if arrivals is None:
            slot = rem(count, ring.stages)
            pl.when(count >= ring.stages)(lambda: plgpu.barrier_wait(ring.consumed.at[slot]))
            copy(
                tiles=(ring.keys.at[slot], ring.values.at[slot]),
                scales=None,
                arrives=ring.fetched.at[slot],
            )
            return count + 1
        slot = rem(count, arrivals.stages)
        tiles, scales = (arrivals.keys.at[slot], arrivals.values.at[slot]), arrivals.scales.at[slot]
        copy(tiles=tiles, scales=scales, arrives=arrivals.arrived.at[slot])
        behind = count - (arrivals.stages - 1)
        pl.when(behind >= 0)(lambda: pass_tile(ring, arrivals, behind, registers))
        return count + 1

    return jax.lax.fori_loop(0, num_tiles, fetch_tile, count)


def pass_tile(ring: Ring, arrivals: Arrivals, count: jax.Array, registers: Registers) -> None:
    """Puts the `count`-th tile of the arrivals into the ring, its numbers as bfloat16 ones."""
    source, target = rem(count, arrivals.stages), rem(count, ring.stages)
    plgpu.barrier_wait(arrivals.arrived.at[source])
    pl.when(count >= ring.stages)(lambda: plgpu.barrier_wait(ring.consumed.at[target]))
    for numbers, tile in ((arrivals.keys, ring.keys), (arrivals.values, ring.values)):
        _put_numbers(registers.bytes(numbers.at[source]), tile.at[target])
    _put_scales(arrivals.scales.at[source][...], ring.scales.at[target])
    # All have read before what they read is overwritten, and matmuls see what they wrote.
    plgpu.commit_smem()
    plgpu.barrier_arrive(ring.fetched.at[target])


def _put_numbers(stored: jax.Array, tile: Any) -> None:
    """Puts the numbers of `QuantisedPages` [TILE, H or H/2] into a tile [TILE, H]."""
    half = stored.shape[1]
    if tile.shape[1] == half:
        tile[...] = stored.astype(jnp.bfloat16)
        return
    # Without shifts, for which there is no instruction of four bytes.
    low = (stored & jnp.int8(15)).astype(jnp.bfloat16)
    high = (stored & jnp.int8(-16)).astype(jnp.bfloat16)
    tile.at[:, pl.ds(0, half)][...] = low - jnp.bfloat16(8)
    tile.at[:, pl.ds(half, half)][...] = high * jnp.bfloat16(1 / 16)


def _put_scales(stored: jax.Array, scales: Any) -> None:
    """Puts the scales of `QuantisedPages` [2, TILE] into those of a ring's stage."""
    if scales.shape[0] == 2:
        scales[...] = stored.astype(jnp.float32)
        return
    scale, offset = unpack_scales(stored)
    scales.at[pl.ds(0, 2)][...] = scale
    scales.at[pl.ds(2, 2)][...] = offset + scale * 0.5


def pass_last(
    ring: Ring, arrivals: Arrivals | None, count: jax.Array, registers: Registers
) -> None:
    """Passes the last of `count` tiles in all, which `fetch_tiles` has left among the arrivals."""
    if arrivals is None:
        return
    first = jnp.maximum(count - (arrivals.stages - 1), 0)
    jax.lax.fori_loop(
        first, count, lambda behind, _: pass_tile(ring, arrivals, behind, registers), None
    )


def products_with_keys(
    s: jax.Array, scales: Any, sums: Any, *, axis: int, registers: Registers
) -> jax.Array:
    """Turns products of queries with the numbers of a tile into those with its keys, which `axis`
    counts. scales: of a stage of a ring; sums: of the queries, None without offsets.
    """
    s *= registers.along(scales.at[0], axis, s.shape)
    if sums is None:
        return s
    offset = registers.along(scales.at[2], axis, s.shape)
    return s + offset * registers.along(sums, 1 - axis, s.shape)


def weights_of_values(
    p: jax.Array, scales: Any, *, axis: int, registers: Registers
) -> tuple[jax.Array, jax.Array | None]:
    """Returns what the numbers of a tile's values are weighted by, where the values are by p, and
    how much each adds to all numbers of the result: None without offsets.
    """

    def times(x: Any) -> jax.Array:
        # The scale of a slot that no one owns may be NaN.
        return jnp.where(p > 0, p * registers.along(x, axis, p.shape), 0.0)

    offset = times(scales.at[3]) if scales.shape[0] == 4 else None
    return times(scales.at[1]), offset


def product(a: Any, b: Any, shape: tuple[int, int]) -> jax.Array:
    """Multiplies references a [M, K] and b [K, N] to shared memory: [M, N] float32."""

    def run(acc: Any) -> jax.Array:
        plgpu.wgmma(acc, a, b)
        return acc[...]

    return pl.run_scoped(run, plgpu.ACC(shape, jnp.float32))


class Registers:
    """Makes arrays that lie as a matmul's result does. The interpreter has no registers."""

    def __init__(self, interpret: Any) -> None:
        self._plain = bool(interpret)

    def iota(self, shape: tuple[int, ...], axis: int) -> jax.Array:
        if self._plain:
            return jax.lax.broadcasted_iota(jnp.int32, shape, axis)
        return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA)

    def full(self, shape: tuple[int, int], value: float) -> jax.Array:
        return self._cast(jnp.full(shape, value, jnp.float32), plgpu.Layout.WGMMA)

    def reduced(self, length: int, value: float, axis: int) -> jax.Array:
        """Makes an array that lies as a sum over `axis` does."""
        return self._cast(jnp.full((length,), value, jnp.float32), plgpu.Layout.WGMMA.reduce(axis))

    def bytes(self, ref: Any) -> jax.Array:
        """Reads a tile, four bytes of a row at once in each thread."""
        return self._cast(ref[...], plgpu.Layout.WGMMA_UPCAST_2X)

    def along(self, ref: Any, axis: int, shape: tuple[int, ...]) -> jax.Array:
        """Reads the numbers of a reference, one for each row (axis 0) or column of `shape`."""
        x = self._cast(ref[...], plgpu.Layout.WGMMA.reduce(1 - axis))
        return jax.lax.broadcast_in_dim(x, shape, [axis])

    def transposed(self, x: jax.Array) -> jax.Array:
        """Lays x out to be stored to a transposed reference."""
        return self._cast(x, plgpu.Layout.WGMMA_TRANSPOSED)

    def _cast(self, x: jax.Array, layout: Any) -> jax.Array:
        return x if self._plain else plgpu.layout_cast(x, layout)

    def accumulate(self, acc: jax.Array, a: jax.Array, b: Any, staged: Any) -> jax.Array:
        """Returns acc + a @ b, a from registers and no registers for the product. The interpreter
        knows no such matmul: there `staged`, shared memory as large as a, takes it.
        """
        if self._plain:
            staged[...] = a
            return acc + product(staged, b, (acc.shape[0], acc.shape[1]))
        return pl.run_state(lambda ref: plgpu.wgmma(ref, a, b))(plgpu.ACC.init(acc))

    def clear_tail(self, tile: Any, left: jax.Array) -> None:
        """Puts zeros in the rows of a tile from `left` on: there may be NaN, and 0 x NaN is NaN, so
        that a weight of zero does not clear a value.
        """

        @pl.when(left < TILE)
        def _() -> None:
            held = tile[...]
            tile[...] = jnp.where(self.iota(held.shape, 0) < left, held, jnp.zeros_like(held))
            plgpu.commit_smem()


def scaled(s: jax.Array, scale: float, softcap: float | None) -> jax.Array:
    """Multiplies scores by log2(e), capped where that is wanted. exp2 is one operation less than
    exp.
    """
    if softcap is None:
        return s * (scale * LOG2E)
    return jnp.tanh(s * (scale / softcap)) * (softcap * LOG2E)
