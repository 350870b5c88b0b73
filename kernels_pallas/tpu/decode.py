"""Paged decode attention: one query per row, the step's own key and value written into their page
on the way.

One program walks over a list of blocks of pages (`DecodeItems`). Pages of two blocks are on their
way from HBM while a third is attended; each block has its own softmax, which is merged into the
row's running one (arXiv 2205.14135, section 3.1), so that blocks depend on each other only in a few
registers. Three blocks are one round of the loop: with the slot of a block known when compiling,
the compiler sees that a DMA into one slot and loads from another do not meet, and issues the former
beside the latter (measured: with a traced slot it puts all of one before all of the other).

A row's last block may hold little: of bfloat16 pages it is attended by code for a quarter, a half
or all of the block. A round of full blocks, with nothing to clear or to choose, has code of its
own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
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
    HeadRow,
    PerPool,
    Static,
    columns,
    div,
    dot,
    elements,
    scores,
    start_all,
    wait_all,
    weights,
)
from kernels_pallas.tpu.checks import compiler_params
from kernels_pallas.tpu.latent import Running, Seen, attend_latent
from kernels_pallas.tpu.layout import LANES
from kernels_pallas.tpu.schedule import RECORD_FIELDS, RECORD_IDS, Schedule
from kernels_pallas.tpu.tiles import AHEAD, SLOTS, TILE, sizes_attended

RECORDS = 8
"""Items whose records are in scalar memory, or on their way there, where not all are."""

RECORDS_AHEAD = RECORDS - 2
"""How far ahead of its block a record is asked for: the one before the block is still in use."""


class Work(NamedTuple):
    """Tells what `DecodeItems` says of an item, and its page ids. await_next(item): those of item
    + SLOTS come next.
    """

    row: Callable[[jax.Array], jax.Array]
    low: Callable[[jax.Array], jax.Array]
    high: Callable[[jax.Array], jax.Array]
    new: Callable[[jax.Array], jax.Array]
    first: Callable[[jax.Array], jax.Array]
    page: Callable[[jax.Array, int | jax.Array], jax.Array]
    await_next: Callable[[jax.Array], None]


class Held(NamedTuple):
    """Holds the lists of `DecodeItems`, and the flat table, in scalar memory."""

    row: Any
    start: Any
    low: Any
    high: Any
    new: Any
    first: Any
    table: Any


class Scalars(NamedTuple):
    """Holds what is in scalar memory from the beginning. held: None where records are streamed."""

    num: Any
    base: Any
    held: Held | None


class Operands(NamedTuple):
    """Holds what is read: records in HBM, None where they are held, queries, sinks and new keys and
    values in VMEM, pools in HBM, which the kernel reads as its results.
    """

    records: Any
    q_DJMX: Any
    sinks_JMX: Any
    new: PerPool
    pools: PerPool


class Results(NamedTuple):
    """Holds outputs, in VMEM, and the pools."""

    out_DJMX: Any
    pools: PerPool


class Scratch(NamedTuple):
    """Holds blocks of pages, SLOTS of each pool; the running softmax of a row: its max, sum and
    accumulator; weights; numbers of slots; semaphores of blocks fetched and tiles written; a ring
    of records and its semaphores, None where they are held.
    """

    blocks: PerPool
    max_JMX: Any
    sum_JMX: Any
    acc_JMX: Any
    weights_JMS: Any
    slot_MS: Any
    fetched: PerPool
    written: PerPool
    ring: Any
    asked: Any


def _held(held: Held) -> Work:
    """Reads all from scalar memory."""

    def of(ref: Any) -> Callable[[jax.Array], jax.Array]:
        return lambda item: ref[item]

    return Work(
        row=of(held.row),
        low=of(held.low),
        high=of(held.high),
        new=of(held.new),
        first=of(held.first),
        page=lambda item, i: held.table[held.start[item] + i],
        await_next=lambda item: None,
    )


def _streamed(records: Any, ring: Any, asked: Any) -> tuple[Work, Callable[[jax.Array], Any]]:
    """Reads one record after the other from HBM; returns what copies an item's, too."""

    def ask(item: jax.Array) -> Any:
        slot = jax.lax.rem(item, jnp.int32(RECORDS))
        known = jnp.minimum(item, records.shape[0] - 1)  # the last one is of nothing
        return pltpu.make_async_copy(records.at[known], ring.at[slot], asked.at[slot])

    def field(number: int | jax.Array, item: jax.Array) -> jax.Array:
        return ring[jax.lax.rem(item, jnp.int32(RECORDS)), 0, number]

    def await_next(item: jax.Array) -> None:
        ask(item + RECORDS_AHEAD).start()
        ask(item + SLOTS).wait()

    def of(name: str) -> Callable[[jax.Array], jax.Array]:
        return partial(field, RECORD_FIELDS.index(name))

    work = Work(
        row=of("row"),
        low=of("low"),
        high=of("high"),
        new=of("new"),
        first=of("first"),
        page=lambda item, i: field(RECORD_IDS + i, item),
        await_next=await_next,
    )
    return work, ask


class Block(NamedTuple):
    """Holds one block's softmax, relative to its own max: [M, 1] each. added: to all elements of
    its values' sum.
    """

    top: jax.Array
    sum: jax.Array
    added: jax.Array | None


def _kernel(
    static: Static, scalars: Scalars, given: Operands, results: Results, scratch: Scratch
) -> None:
    if scalars.held is None:
        work, ask = _streamed(given.records, scratch.ring, scratch.asked)
    else:
        work = _held(scalars.held)
    packing, layout, block, size = static.packing, static.layout, static.block, static.page_size
    num, base, new, pools = scalars.num, scalars.base, given.new, results.pools
    fetched, written = scratch.fetched, scratch.written
    blocks = [
        PerPool(*(None if buffers is None else buffers[slot] for buffers in scratch.blocks))
        for slot in range(SLOTS)
    ]
    sizes = sizes_attended(block, layout=layout, itemsize=static.dtype.itemsize, packing=packing)
    max_JMX, sum_JMX, acc_JMX = scratch.max_JMX, scratch.sum_JMX, scratch.acc_JMX
    weights_JMS, slot_MS = scratch.weights_JMS, scratch.slot_MS
    tile, per_word = (TILE, 1) if packing is None else (packing.tile, packing.per_word)

    def fetch_page(item: jax.Array, i: int, slot: int) -> list[Any]:
        page = base[0] + work.page(item, i)
        parts = zip(pools.each(), blocks[slot].each(), fetched.each(), strict=True)
        return [
            pltpu.make_async_copy(pool.at[page], part.at[i], done.at[slot])
            for pool, part, done in parts
        ]

    def fetch(item: jax.Array, slot: int) -> None:
        for i in range(block):
            copies = fetch_page(
                item, i, slot
            )  # not inside: what scalars say is read beside what comes before
            pl.when(i * size < work.high(item))(partial(start_all, copies))

    def await_fetch(item: jax.Array, slot: int) -> None:
        pages_fetched = div(work.high(item) + size - 1, size)
        if static.wait_by_page:

            @pl.loop(0, pages_fetched)
            def _(_: jax.Array) -> None:
                wait_all(fetch_page(item, 0, slot))

            return
        for part, done in zip(blocks[slot].each(), fetched.each(), strict=True):
            arrived = part.at[pl.ds(0, pages_fetched)]
            pl.when(pages_fetched > 0)(pltpu.make_async_copy(arrived, arrived, done.at[slot]).wait)

    def pages_attended(item: jax.Array) -> jax.Array:
        """Returns the fewest of `sizes` that hold what the row has in the block, 0 past the last
        block.
        """
        high, attended = work.high(item), jnp.int32(block)
        for pages in reversed([0, *sizes[:-1]]):
            attended = jnp.where(high <= pages * size, pages, attended)
        return attended

    def clear_tail(item: jax.Array, slot: int, attended: int | jax.Array) -> None:
        """Clears what no one owns of the pages that are attended: it may be NaN, and 0 x NaN is
        NaN, so that a weight of zero does not clear a value.
        """
        high = work.high(item)

        @pl.loop(div(high, size), attended)
        def _(i: jax.Array) -> None:
            rows = pl.ds(layout.values, layout.value_rows)
            values = blocks[slot].pages[i, rows]
            held = jax.lax.broadcasted_iota(jnp.int32, values.shape, 1) < high - i * size
            blocks[slot].pages[i, rows] = jnp.where(held, values, jnp.zeros_like(values))

    def tile_of_new(item: jax.Array) -> tuple[jax.Array, Any, jax.Array]:
        """Returns (page of the block, rows of the tile, slot in the tile)."""
        at = jnp.maximum(work.new(item), 0)
        page = div(at, size)
        offset = at - page * size
        start = pl.multiple_of(div(offset, tile) * (tile // per_word), tile // per_word)
        return page, pl.ds(start, tile // per_word), jax.lax.rem(offset, jnp.int32(tile))

    def store_new(item: jax.Array, slot: int) -> None:
        """Puts the step's key and value among the fetched pages, from where their tile goes back to
        HBM.
        """
        i, rows, place = tile_of_new(item)
        tiles = [(i, c, rows) for c in range(layout.rows)]
        line, shift = (place, place) if packing is None else packing.place(place)
        here = jax.lax.broadcasted_iota(jnp.int32, (tile // per_word, layout.width), 0) == line
        here &= work.new(item) >= 0
        row = work.row(item)
        merged = []
        for c, at in enumerate(tiles):
            old, values = (
                blocks[slot].pages[at],
                jnp.broadcast_to(new.pages[row, pl.ds(c, 1)], here.shape),
            )
            if packing is None:
                values = values.astype(old.dtype)
            else:
                field = jax.lax.shift_left(jnp.int32(2**packing.num_bits - 1), shift)
                values = (old & ~field) | jax.lax.shift_left(values, shift)
            merged.append(jnp.where(here, values, old))
        # All loads before all stores, which the compiler cannot reorder: it does not know that the
        # tiles differ.
        for at, values in zip(tiles, merged, strict=True):
            blocks[slot].pages[at] = values
        if packing is not None:
            old = blocks[slot].scales[i]
            of_slot = jax.lax.rem(
                jax.lax.broadcasted_iota(jnp.int32, old.shape, 1), jnp.int32(size)
            )
            here = (of_slot == jax.lax.rem(work.new(item), jnp.int32(size))) & (work.new(item) >= 0)
            blocks[slot].scales[i] = jnp.where(here, new.scales[row], old)

    def write_tile(item: jax.Array, slot: int) -> list[Any]:
        i, rows, _ = tile_of_new(item)
        page = base[0] + work.page(item, i)
        source, target = blocks[slot].pages.at[i, :, rows], pools.pages.at[page, :, rows]
        copies = [pltpu.make_async_copy(source, target, written.pages.at[slot])]
        if packing is not None:
            source, target = blocks[slot].scales.at[i], pools.scales.at[page]
            copies.append(pltpu.make_async_copy(source, target, written.scales.at[slot]))
        return copies

    def await_tile_before(item: jax.Array, slot: int) -> None:
        """Waits until the tile of the block before has left: its slot is free then."""
        before = jnp.maximum(item - 1, 0)
        pl.when((item > 0) & (work.new(before) >= 0))(
            partial(wait_all, write_tile(before, (slot - 1) % SLOTS))
        )

    def attend(item: jax.Array, slot: int, pages: int) -> None:
        row, first = work.row(item), work.first(item) > 0
        if layout.kind == "latent":
            attend_latent(
                static,
                given.q_DJMX[row, 0],
                blocks[slot],
                Seen(work.low(item), work.high(item), first),
                Running(max_JMX.at[0], sum_JMX.at[0], acc_JMX.at[0]),
                weights_JMS.at[0],
                results.out_DJMX.at[row, 0],
            )
            return

        part, slots = blocks[slot], pl.ds(0, pages * size)
        if pages < block:
            part = part._replace(pages=part.pages.at[pl.ds(0, pages)])

        def weigh(at: HeadRow) -> tuple[HeadRow, Block]:
            """Takes the block's own softmax for the queries of a row of heads."""
            j = at.number
            # Read back for each row of heads: kept in registers it makes the others spill.
            place = (
                slot_MS[:, slots]
                if layout.joined > 1
                else jax.lax.broadcasted_iota(jnp.int32, (static.rows, pages * size), 1)
            )
            seen = place < work.high(item)
            if static.windowed:
                seen &= place >= work.low(item)
            s = jnp.where(seen, scores(given.q_DJMX[row, j], part, at, static), MASKED)
            top = jnp.max(s, axis=1, keepdims=True)
            p = jnp.exp2(s - top)
            of_values = columns(
                part, at, static, of_values=True, held_1S=place[:1] < work.high(item)
            )
            weights_JMS[j, :, slots], added = weights(p, of_values, static)
            return at, Block(top, jnp.sum(p, axis=1, keepdims=True), added)

        def merge(at: HeadRow, new: Block) -> None:
            j = at.number
            values = elements(part, layout.values + j, static, of_values=True)
            gained = dot(weights_JMS[j, :, slots], values, (1, 0))
            gained = gained if new.added is None else gained + new.added
            old_max = jnp.where(first, given.sinks_JMX[j] if static.sinks else MASKED, max_JMX[j])
            old_sum = jnp.where(first, 1.0 if static.sinks else 0.0, sum_JMX[j])
            top = jnp.maximum(old_max, new.top)
            shrink, share = jnp.exp2(old_max - top), jnp.exp2(new.top - top)
            total = old_sum * shrink + new.sum * share
            acc = jnp.where(first, 0.0, acc_JMX[j]) * shrink + gained * share
            max_JMX[j], sum_JMX[j], acc_JMX[j] = top, total, acc
            results.out_DJMX[row, j] = acc / total

        # Softmaxes run beside the matmuls of other rows of heads. Their weights wait in VMEM:
        # registers would spill.
        def attend_heads(begin: int | jax.Array) -> None:
            pending: list[tuple[HeadRow, Block]] = []
            for j in range(static.heads):
                pending.append(weigh(HeadRow(begin, j)))
                if len(pending) > AHEAD:
                    merge(*pending.pop(0))
            for each in pending:
                merge(*each)

        if static.heads == layout.joined:
            attend_heads(0)
        else:
            pl.loop(0, layout.joined, step=static.heads)(attend_heads)

    def work_on(item: jax.Array, slot: int, pages: int) -> None:
        store_new(item, slot)
        pl.when(work.new(item) >= 0)(partial(start_all, write_tile(item, slot)))
        await_tile_before(item, slot)
        fetch(item + SLOTS - 1, (slot - 1) % SLOTS)
        attend(item, slot, pages)

    def run_whole(item: jax.Array, slot: int, *, clears: bool) -> None:
        work.await_next(item)
        await_fetch(item, slot)
        if clears:
            clear_tail(item, slot, block)
        work_on(item, slot, block)

    def run_part(item: jax.Array, slot: int) -> None:
        work.await_next(item)
        await_fetch(item, slot)
        attended = pages_attended(item)
        clear_tail(item, slot, attended)
        pl.when(attended == 0)(partial(await_tile_before, item, slot))
        # All of it for each size: what is issued together has to be in one basic block.
        for pages in sizes:
            pl.when(attended == pages)(partial(work_on, item, slot, pages))

    if layout.kind != "latent":
        slot_MS[...] = jax.lax.broadcasted_iota(jnp.int32, slot_MS.shape, 1)
    results.out_DJMX[...] = jnp.zeros_like(results.out_DJMX)
    if static.streamed:
        for i in range(RECORDS_AHEAD):
            ask(jnp.int32(i)).start()
        for i in range(SLOTS):
            ask(jnp.int32(i)).wait()
    for slot in range(SLOTS - 1):
        fetch(jnp.int32(slot), slot)
    rounds = div(num[0] + SLOTS - 1, SLOTS)

    @pl.loop(0, rounds)
    def round_of_slots(i: jax.Array) -> None:
        def each(run: Callable[[jax.Array, int], None]) -> None:
            for slot in range(SLOTS):
                run(i * SLOTS + slot, slot)

        if len(sizes) == 1:
            each(partial(run_whole, clears=packing is None))
            return
        held = sum(work.high(i * SLOTS + slot) for slot in range(SLOTS))
        is_full = held == SLOTS * block * size
        pl.when(is_full)(partial(each, partial(run_whole, clears=False)))
        pl.when(jnp.logical_not(is_full))(partial(each, run_part))

    last = jnp.maximum(rounds * SLOTS - 1, 0)
    pl.when((rounds > 0) & (work.new(last) >= 0))(partial(wait_all, write_tile(last, SLOTS - 1)))
    if static.streamed:
        for i in range(SLOTS, RECORDS_AHEAD):
            ask(rounds * SLOTS + i).wait()


def decode(
    q_DJMX: jax.Array,
    new: PerPool,
    sinks_JM: jax.Array | None,
    pools: PerPool,
    schedule: Schedule,
    base: jax.Array,
    *,
    static: Static,
    interpret: Any = False,
) -> tuple[jax.Array, PerPool]:
    """Returns (out [D, J, M, X] float32, pools).

    pools: the pages of floats, or words and scales (`packing`). new: for the D decode rows what
    goes into them, [D, C, X] in the dtype of the pages; or whole numbers [D, C, X] and words in all
    slots [D, 1, Z], int32. q: in
    `static.dtype`. base [1]: the layer's first row in the pools. A row without items gets zeros.
    """
    layout = static.layout
    num_rows, joined, per_row, _ = q_DJMX.shape
    padded = -(-per_row // SUBLANES) * SUBLANES
    static = replace(static, rows=padded)
    q_DJMX = jnp.pad(q_DJMX, ((0, 0), (0, 0), (0, padded - per_row), (0, 0)))
    if sinks_JM is None:
        sinks_JMX = jnp.zeros((1, SUBLANES, LANES), jnp.float32)
    else:
        sinks_JMX = jnp.pad(sinks_JM * LOG2E, ((0, 0), (0, padded - per_row)))[:, :, None]
        sinks_JMX = jnp.broadcast_to(sinks_JMX, (joined, padded, layout.out_width))
    if static.packing is None:
        new = new._replace(pages=new.pages.astype(jnp.float32))
    items = schedule.decode
    shapes = [(static.block, *pool.shape[1:]) for pool in pools.each()]
    block_bytes = sum(
        math.prod(shape) * pool.dtype.itemsize
        for shape, pool in zip(shapes, pools.each(), strict=True)
    )
    vmem_bytes = (
        q_DJMX.dtype.itemsize * q_DJMX.size
        + 4 * num_rows * joined * padded * layout.out_width
        + 4 * sum(x.size for x in new.each())
        + SLOTS * block_bytes
    )
    if vmem_bytes > VMEM_BYTES:
        raise NotImplementedError(
            f"{num_rows} decode rows: {vmem_bytes} bytes do not fit {VMEM_BYTES} bytes of VMEM"
        )
    records = schedule.records
    held = None
    if records is None:
        held = Held(
            row=items.row,
            start=items.start,
            low=items.low,
            high=items.high,
            new=items.new,
            first=items.first,
            table=schedule.table,
        )
    scalars = Scalars(items.num, base, held)
    given = Operands(records, q_DJMX, sinks_JMX, new, pools)
    in_vmem, in_hbm = pl.BlockSpec(memory_space=pltpu.VMEM), pl.BlockSpec(memory_space=pl.ANY)
    pool_specs = jax.tree.map(lambda _: in_hbm, pools)
    state = pltpu.VMEM((joined, padded, layout.out_width), jnp.float32)
    is_latent = layout.kind == "latent"
    top = pltpu.VMEM((joined, padded, LANES), jnp.float32) if is_latent else state
    done = jax.tree.map(lambda _: pltpu.SemaphoreType.DMA((SLOTS,)), pools)
    out = Results(
        jax.ShapeDtypeStruct((*q_DJMX.shape[:3], layout.out_width), jnp.float32),
        jax.tree.map(lambda pool: jax.ShapeDtypeStruct(pool.shape, pool.dtype), pools),
    )
    # The pools come last among operands and among results.
    before = len(jax.tree.leaves((scalars, given))) - len(pools.each())
    (found,) = pl.pallas_call(
        partial(_kernel, static),
        name="paged_decode",
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            in_specs=[
                Operands(
                    records=None if records is None else in_hbm,
                    q_DJMX=in_vmem,
                    sinks_JMX=in_vmem,
                    new=jax.tree.map(lambda _: in_vmem, new),
                    pools=pool_specs,
                )
            ],
            out_specs=[Results(in_vmem, pool_specs)],
            scratch_shapes=[
                Scratch(
                    blocks=jax.tree.map(
                        lambda pool: (
                            (pltpu.VMEM((static.block, *pool.shape[1:]), pool.dtype),) * SLOTS
                        ),
                        pools,
                    ),
                    max_JMX=top,
                    sum_JMX=top,
                    acc_JMX=state,
                    weights_JMS=pltpu.VMEM((joined, padded, static.slots), static.dtype),
                    slot_MS=None if is_latent else pltpu.VMEM((padded, static.slots), jnp.int32),
                    fetched=done,
                    written=done,
                    ring=None
                    if records is None
                    else pltpu.SMEM((RECORDS, *records.shape[1:]), jnp.int32),
                    asked=None if records is None else pltpu.SemaphoreType.DMA((RECORDS,)),
                )
            ],
        ),
        out_shape=[out],
        input_output_aliases={before + i: 1 + i for i in range(len(pools.each()))},
        compiler_params=compiler_params(vmem_limit_bytes=VMEM_BYTES),
        interpret=interpret,
    )(scalars, given)
    return found.out_DJMX[:, :, :per_row], found.pools
