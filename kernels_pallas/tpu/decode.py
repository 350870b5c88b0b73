"""Paged decode attention: one query per row, the step's own key and value written into their page on the way.

One program walks over a list of blocks of pages (`DecodeItems`). Pages of two blocks are on their way from HBM while a
third is attended; each block has its own softmax, which is merged into the row's running one (arXiv 2205.14135, section
3.1), so that blocks depend on each other only in a few registers. Three blocks are one round of the loop: with the slot
of a block known when compiling, the compiler sees that a DMA into one slot and loads from another do not meet, and
issues the former beside the latter (measured: with a traced slot it puts all of one before all of the other).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.tpu.block import (
    LOG2E,
    MASKED,
    SUBLANES,
    VMEM_BYTES,
    Static,
    div,
    dot,
    elements,
    in_lanes,
    scaled,
    scores,
    slot_scale,
)
from kernels_pallas.tpu.layout import LANES
from kernels_pallas.tpu.schedule import RECORD_FIELDS, RECORD_IDS, Schedule
from kernels_pallas.tpu.tiles import AHEAD, SLOTS, TILE

RECORDS = 8
"""Items whose records are in scalar memory, or on their way there, where not all are."""

RECORDS_AHEAD = RECORDS - 2
"""How far ahead of its block a record is asked for: the one before the block is still in use."""


class Work(NamedTuple):
    """What `DecodeItems` says of an item, and its page ids. await_next(item): those of item + SLOTS - 1 come next."""

    row: Callable[[jax.Array], jax.Array]
    low: Callable[[jax.Array], jax.Array]
    high: Callable[[jax.Array], jax.Array]
    new: Callable[[jax.Array], jax.Array]
    first: Callable[[jax.Array], jax.Array]
    page: Callable[[jax.Array, int | jax.Array], jax.Array]
    await_next: Callable[[jax.Array], None]


def _held(row_I: Any, start_I: Any, low_I: Any, high_I: Any, new_I: Any, first_I: Any, table: Any) -> Work:
    """All in scalar memory."""
    refs = zip(RECORD_FIELDS, (row_I, low_I, high_I, new_I, first_I), strict=True)
    fields: dict[str, Any] = {name: partial(lambda ref, item: ref[item], ref) for name, ref in refs}
    return Work(**fields, page=lambda item, i: table[start_I[item] + i], await_next=lambda item: None)


def _streamed(records: Any, ring: Any, asked: Any) -> tuple[Work, Callable[[jax.Array], Any]]:
    """One record after the other from HBM; with what copies an item's."""

    def ask(item: jax.Array) -> Any:
        slot = jax.lax.rem(item, jnp.int32(RECORDS))
        known = jnp.minimum(item, records.shape[0] - 1)  # the last one is of nothing
        return pltpu.make_async_copy(records.at[known], ring.at[slot], asked.at[slot])

    def field(number: int | jax.Array, item: jax.Array) -> jax.Array:
        return ring[jax.lax.rem(item, jnp.int32(RECORDS)), 0, number]

    def await_next(item: jax.Array) -> None:
        ask(item + RECORDS_AHEAD).start()
        ask(item + SLOTS - 1).wait()

    fields: dict[str, Any] = {name: partial(field, number) for number, name in enumerate(RECORD_FIELDS)}
    return Work(**fields, page=lambda item, i: field(RECORD_IDS + i, item), await_next=await_next), ask


class Block(NamedTuple):
    """Of one block's softmax, relative to its own max: [M, 1] each."""

    top: jax.Array
    sum: jax.Array
    entropy: jax.Array | None


def page_masses(p_MS: jax.Array, top_M1: jax.Array, static: Static) -> jax.Array:
    """[M, LANES]: the sum of p over page i of the block in lane i, and the max that it is relative to in the last."""
    slot = jax.lax.broadcasted_iota(jnp.int32, (static.slots, LANES), 0)
    lane = jax.lax.broadcasted_iota(jnp.int32, (static.slots, LANES), 1)
    mass = dot(p_MS, (div(slot, static.page_size) == lane).astype(jnp.float32), (1, 0))
    lane = jax.lax.broadcasted_iota(jnp.int32, mass.shape, 1)
    return jnp.where(lane == LANES - 1, top_M1 / LOG2E, mass)


def _kernel(static: Static, *refs: Any) -> None:
    num, base, *rest = refs
    if static.streamed:
        records, *rest, ring, asked = rest
        work, ask = _streamed(records, ring, asked)
    else:
        work, rest = _held(*rest[:7]), rest[7:]
    q_DJMX, new_DCX, sinks_JMX, _, out_DJMX, pages, statistics_DJML, mass_IJML = rest[:8]
    blocks = rest[8 : 8 + SLOTS]
    max_JMX, sum_JMX, entropy_JMX, acc_JMX, weights_JMS, slot_MS, mass_SJML = rest[8 + SLOTS : -3]
    fetched, written, mass_sent = rest[-3:]
    layout, block, size = static.layout, static.block, static.page_size

    def fetch_page(item: jax.Array, i: int, slot: int) -> Any:
        page = base[0] + work.page(item, i)
        return pltpu.make_async_copy(pages.at[page], blocks[slot].at[i], fetched.at[slot])

    def fetch(item: jax.Array, slot: int) -> None:
        for i in range(block):
            copy = fetch_page(item, i, slot)
            pl.when(i * size < work.high(item))(copy.start)

    def await_fetch(item: jax.Array, slot: int) -> None:
        pages_fetched = div(work.high(item) + size - 1, size)
        if static.wait_by_page:
            pl.loop(0, pages_fetched)(lambda i: fetch_page(item, 0, slot).wait())
            return
        arrived = blocks[slot].at[pl.ds(0, pages_fetched)]
        pl.when(pages_fetched > 0)(pltpu.make_async_copy(arrived, arrived, fetched.at[slot]).wait)

    def clear_tail(item: jax.Array, slot: int) -> None:
        """What no one owns may be NaN, and 0 x NaN is NaN: a weight of zero does not clear a value."""
        high = work.high(item)

        @pl.loop(div(high, size), block)
        def _(i: jax.Array) -> None:
            rows = pl.ds(layout.values, layout.joined)
            values = blocks[slot][i, rows]
            held = jax.lax.broadcasted_iota(jnp.int32, values.shape, 1) < high - i * size
            blocks[slot][i, rows] = jnp.where(held, values, jnp.zeros_like(values))

    def tile_of_new(item: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        new = jnp.maximum(work.new(item), 0)
        page = div(new, size)
        offset = new - page * size
        return page, pl.multiple_of(div(offset, TILE) * TILE, TILE), jax.lax.rem(offset, jnp.int32(TILE))

    def store_new(item: jax.Array, slot: int) -> None:
        """Puts the step's key and value among the fetched pages, from where their tile goes back to HBM."""
        i, offset, place = tile_of_new(item)
        tiles = [(i, c, pl.ds(offset, TILE)) for c in range(layout.rows)]
        here = jax.lax.broadcasted_iota(jnp.int32, (TILE, layout.width), 0) == place
        here &= work.new(item) >= 0
        row = work.row(item)
        new = [jnp.broadcast_to(new_DCX[row, pl.ds(c, 1)], here.shape).astype(pages.dtype) for c in range(layout.rows)]
        merged = [jnp.where(here, new[c], blocks[slot][tile]) for c, tile in enumerate(tiles)]
        # All loads before all stores, which the compiler cannot reorder: it does not know that the tiles differ.
        for tile, values in zip(tiles, merged, strict=True):
            blocks[slot][tile] = values

    def write_tile(item: jax.Array, slot: int) -> Any:
        i, offset, _ = tile_of_new(item)
        page = base[0] + work.page(item, i)
        source, target = blocks[slot].at[i, :, pl.ds(offset, TILE)], pages.at[page, :, pl.ds(offset, TILE)]
        return pltpu.make_async_copy(source, target, written.at[slot])

    def send_mass(item: jax.Array, slot: int) -> Any:
        return pltpu.make_async_copy(mass_SJML.at[slot], mass_IJML.at[item], mass_sent.at[slot])

    def attend(item: jax.Array, slot: int) -> None:
        row, first = work.row(item), work.first(item) > 0

        def weigh(j: int | jax.Array) -> tuple[int | jax.Array, Block]:
            """The block's own softmax for the queries of row j."""
            # Read back for each row of heads: kept in registers it makes the others spill.
            at = slot_MS[...] if layout.joined > 1 else jax.lax.broadcasted_iota(jnp.int32, slot_MS.shape, 1)
            seen = at < work.high(item)
            if static.window is not None:
                seen &= at >= work.low(item)
            s = jnp.where(seen, scores(q_DJMX[row, j], blocks[slot], j, static), MASKED)
            top = jnp.max(s, axis=1, keepdims=True)
            p = jnp.exp2(s - top)
            if static.page_mass:
                mass_SJML[slot, j] = page_masses(p, top, static)
            entropy = jnp.sum(p * (s - top), axis=1, keepdims=True) if static.statistics else None
            weights_JMS[j] = scaled(p, slot_scale(blocks[slot], layout.values + j)).astype(pages.dtype)
            return j, Block(top, jnp.sum(p, axis=1, keepdims=True), entropy)

        def merge(j: int | jax.Array, new: Block) -> None:
            gained = dot(weights_JMS[j], elements(blocks[slot], layout.values + j), (1, 0))
            old_max = jnp.where(first, sinks_JMX[j] if static.sinks else MASKED, max_JMX[j])
            old_sum = jnp.where(first, 1.0 if static.sinks else 0.0, sum_JMX[j])
            top = jnp.maximum(old_max, new.top)
            shrink, share = jnp.exp2(old_max - top), jnp.exp2(new.top - top)
            total = old_sum * shrink + new.sum * share
            acc = jnp.where(first, 0.0, acc_JMX[j]) * shrink + gained * share
            max_JMX[j], sum_JMX[j], acc_JMX[j] = top, total, acc
            out_DJMX[row, j] = acc / total
            if new.entropy is not None:
                old = jnp.where(first, 0.0, entropy_JMX[j])
                old = shrink * (old + old_sum * (old_max - top))
                entropy_JMX[j] = old + share * (new.entropy + new.sum * (new.top - top))
                statistics_DJML[row, j] = in_lanes(top / LOG2E, total, entropy_JMX[j] / LOG2E)

        # Softmaxes run beside the matmuls of other rows of heads. Their weights wait in VMEM: registers would spill.
        def attend_heads(begin: int | jax.Array) -> None:
            pending: list[tuple[int | jax.Array, Block]] = []
            for j in range(static.heads):
                pending.append(weigh(begin + j))
                if len(pending) > AHEAD:
                    merge(*pending.pop(0))
            for each in pending:
                merge(*each)

        if static.heads == layout.joined:
            attend_heads(0)
        else:
            pl.loop(0, layout.joined, step=static.heads)(attend_heads)

    def run(item: jax.Array, slot: int) -> None:
        work.await_next(item)
        await_fetch(item, slot)
        clear_tail(item, slot)
        store_new(item, slot)
        writes = work.new(item) >= 0
        pl.when(writes)(write_tile(item, slot).start)
        # The slot of the block before this one is free once its own tile has left.
        before = jnp.maximum(item - 1, 0)
        pl.when((item > 0) & (work.new(before) >= 0))(write_tile(before, (slot - 1) % SLOTS).wait)
        fetch(item + SLOTS - 1, (slot - 1) % SLOTS)
        if static.page_mass:
            pl.when(item >= SLOTS)(send_mass(item, slot).wait)
        attend(item, slot)
        if static.page_mass:
            send_mass(item, slot).start()

    slot_MS[...] = jax.lax.broadcasted_iota(jnp.int32, slot_MS.shape, 1)
    out_DJMX[...] = jnp.zeros_like(out_DJMX)
    if static.statistics:
        statistics_DJML[...] = jnp.zeros_like(statistics_DJML)
    if static.streamed:
        for i in range(RECORDS_AHEAD):
            ask(jnp.int32(i)).start()
    for slot in range(SLOTS - 1):
        if static.streamed:
            ask(jnp.int32(slot)).wait()
        fetch(jnp.int32(slot), slot)
    rounds = div(num[0] + SLOTS - 1, SLOTS)

    @pl.loop(0, rounds)
    def round_of_slots(i: jax.Array) -> None:
        for slot in range(SLOTS):
            run(i * SLOTS + slot, slot)

    last = jnp.maximum(rounds * SLOTS - 1, 0)
    pl.when((rounds > 0) & (work.new(last) >= 0))(write_tile(last, SLOTS - 1).wait)
    if static.page_mass:
        for slot in range(SLOTS):
            pl.when(rounds > 0)(send_mass(last, slot).wait)
    if static.streamed:
        for i in range(SLOTS - 1, RECORDS_AHEAD):
            ask(rounds * SLOTS + i).wait()


def decode(
    q_DJMX: jax.Array,
    new_DCX: jax.Array,
    sinks_JM: jax.Array | None,
    pages: jax.Array,
    schedule: Schedule,
    base: jax.Array,
    *,
    static: Static,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array, jax.Array | None, jax.Array | None]:
    """-> (out [D, J, M, X] float32, pages, statistics [D, J, M, 3], masses [items, J, M, LANES]).

    q, new: in the dtype of the pages; D decode rows. base [1]: the layer's first row in `pages`. A row without items
    gets zeros. statistics: max, sum and entropy accumulator of the softmax, its sink included. masses: sums of
    e^(score - max) per page of a block, with the block's own max in the last lane. None unless `static` asks.
    """
    num_rows, joined, per_row, width = q_DJMX.shape
    padded = -(-per_row // SUBLANES) * SUBLANES
    q_DJMX = jnp.pad(q_DJMX, ((0, 0), (0, 0), (0, padded - per_row), (0, 0)))
    if sinks_JM is None:
        sinks_JMX = jnp.zeros((1, SUBLANES, LANES), jnp.float32)
    else:
        sinks_JMX = jnp.pad(sinks_JM * LOG2E, ((0, 0), (0, padded - per_row)))[:, :, None]
        sinks_JMX = jnp.broadcast_to(sinks_JMX, (joined, padded, width))
    items = schedule.decode
    block_bytes = static.block * math.prod(pages.shape[1:]) * pages.dtype.itemsize
    vmem_bytes = (pages.dtype.itemsize + 4) * q_DJMX.size + 4 * new_DCX.size + SLOTS * block_bytes
    if vmem_bytes > VMEM_BYTES:
        raise NotImplementedError(f"{num_rows} decode rows: {vmem_bytes} bytes do not fit {VMEM_BYTES} bytes of VMEM")
    state = (joined, padded, width)
    in_vmem, in_hbm = pl.BlockSpec(memory_space=pltpu.VMEM), pl.BlockSpec(memory_space=pl.ANY)
    lanes = (joined, padded, LANES)
    small = (1, 1, SUBLANES, LANES)
    statistics = (num_rows, *lanes) if static.statistics else small
    masses = (items.row.shape[0], *lanes) if static.page_mass else small
    block_shape = (static.block, *pages.shape[1:])
    scalars = [items.num, base]
    if schedule.records is None:
        scalars += [items.row, items.start, items.low, items.high, items.new, items.first, schedule.table]
    records = [] if schedule.records is None else [schedule.records]
    ring = [pltpu.SMEM((RECORDS, *x.shape[1:]), jnp.int32) for x in records]
    out_DJMX, pages, statistics_DJML, mass_IJML = pl.pallas_call(
        partial(_kernel, static),
        name="paged_decode",
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            in_specs=[*[in_hbm] * len(records), in_vmem, in_vmem, in_vmem, in_hbm],
            out_specs=[in_vmem, in_hbm, in_vmem, in_hbm],
            scratch_shapes=[
                *[pltpu.VMEM(block_shape, pages.dtype)] * SLOTS,
                *[pltpu.VMEM(state, jnp.float32)] * 4,
                pltpu.VMEM((joined, padded, static.slots), pages.dtype),
                pltpu.VMEM((padded, static.slots), jnp.int32),
                pltpu.VMEM((SLOTS, *lanes) if static.page_mass else small, jnp.float32),
                *[pltpu.SemaphoreType.DMA((SLOTS,))] * 3,
                *ring,
                *[pltpu.SemaphoreType.DMA((RECORDS,)) for _ in ring],
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct(q_DJMX.shape, jnp.float32),
            jax.ShapeDtypeStruct(pages.shape, pages.dtype),
            jax.ShapeDtypeStruct(statistics, jnp.float32),
            jax.ShapeDtypeStruct(masses, jnp.float32),
        ],
        input_output_aliases={len(scalars) + len(records) + 3: 1},
        compiler_params=pltpu.CompilerParams(
            vmem_limit_bytes=VMEM_BYTES, disable_bounds_checks=True, disable_semaphore_checks=True
        ),
        interpret=interpret,
    )(*scalars, *records, q_DJMX, new_DCX.astype(jnp.float32), sinks_JMX, pages)
    return (
        out_DJMX[:, :, :per_row],
        pages,
        statistics_DJML[:, :, :per_row, :3] if static.statistics else None,
        mass_IJML[:, :, :per_row] if static.page_mass else None,
    )
