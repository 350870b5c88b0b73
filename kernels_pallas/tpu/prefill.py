"""Paged attention of prefill chunks: blocks of queries against the pages of their row, which hold
the step's own keys and values already. Flash attention, arXiv 2205.14135, algorithm 1, with the
pages fetched one block ahead.
"""

from __future__ import annotations

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
    VMEM_BYTES,
    Columns,
    HeadRow,
    PerPool,
    Static,
    across,
    across_sum,
    columns,
    div,
    dot,
    elements,
    scores,
    shifted,
    start_all,
    wait_all,
    weights,
)
from kernels_pallas.tpu.checks import compiler_params
from kernels_pallas.tpu.layout import LANES
from kernels_pallas.tpu.schedule import Schedule
from kernels_pallas.tpu.tiles import TILE

CHUNK = 64
"""Query rows, at most, whose scores are worked on together."""


def rows_of_columns(x: Columns | None, start: int, count: int) -> Columns | None:
    """Takes those of the queries from `start` on, where they differ."""
    if x is None:
        return None
    return jax.tree.map(lambda y: y if y.shape[0] == 1 else y[start : start + count], x)


class Tables(NamedTuple):
    """Holds page ids and first positions of pages, flat or row by row."""

    table: Any
    first: Any


class Scalars(NamedTuple):
    """Holds lists of `PrefillItems` in scalar memory. lowest_I: None without a window; tables: None
    where they are streamed.
    """

    num: Any
    table_I: Any
    query_I: Any
    slot_I: Any
    low_I: Any
    high_I: Any
    lowest_I: Any
    base: Any
    tables: Any


class Operands(NamedTuple):
    """Holds what is read: tables in HBM, None where scalar memory has them, queries in HBM, which
    of its tokens a row of queries is, sinks, and the pools in HBM.

    q_TX: a token's queries side by side in its lanes, as XLA gathers whole tokens. Rows of queries
    R are an item's tokens for one query after the other: whole registers of both.
    """

    tables: Any
    q_TX: Any
    offset_RL: Any
    sinks_JRL: Any
    pools: PerPool


class Scratch(NamedTuple):
    """Holds two blocks of pages; an item's queries as they are fetched, and as rows; the running
    softmax: its max, sum and accumulator; the result on its way out; how many blocks were attended;
    scores and weights of two rows of heads; distances of slots from queries; semaphores; and, where
    tables are streamed, those of two items' rows and their semaphores.
    """

    blocks: PerPool
    query: Any
    q_JRX: Any
    max_JRL: Any
    sum_JRL: Any
    acc_JRX: Any
    result: Any
    steps: Any
    scores: tuple[Any, Any]
    weights: tuple[Any, Any]
    distance_RS: Any
    queried: Any
    sent: Any
    fetched: PerPool
    held: Any
    asked: Any


def _kernel(
    static: Static, scalars: Scalars, given: Operands, out_TX: Any, scratch: Scratch
) -> None:
    num, base, slot_I, low_I = scalars.num, scalars.base, scalars.slot_I, scalars.low_I
    table_I, query_I, high_I = scalars.table_I, scalars.query_I, scalars.high_I
    lowest_I, held = scalars.lowest_I, scratch.held
    tables = given.tables if static.streamed else scalars.tables
    query, result, sent, queried = scratch.query, scratch.result, scratch.sent, scratch.queried
    max_JRL, sum_JRL, acc_JRX = scratch.max_JRL, scratch.sum_JRL, scratch.acc_JRX
    q_JRX = scratch.q_JRX
    blocks, fetched, steps = scratch.blocks, scratch.fetched, scratch.steps
    distance_RS = scratch.distance_RS
    layout, size, slots = static.layout, static.page_size, static.slots
    part_slots = static.part * size
    num_rows = static.rows
    per_row = num_rows // static.queries
    chunk = max(rows for rows in range(16, CHUNK + 1, 16) if num_rows % rows == 0)

    def ask(item: jax.Array) -> list[Any]:
        """Makes copies of the tables of an item's row, where they are not in scalar memory."""
        slot = jax.lax.rem(item, jnp.int32(2))
        copies = [(tables.table, held.table)]
        if static.windowed:
            copies.append((tables.first, held.first))
        return [
            pltpu.make_async_copy(x.at[table_I[item]], y.at[slot], scratch.asked.at[slot])
            for x, y in copies
        ]

    def of_pages(item: jax.Array, *, first: bool = False) -> Callable[[jax.Array], jax.Array]:
        """Reads ids of the item's row's pages, or their first positions, by their place in it."""
        known = held if static.streamed else tables
        ref = known.first if first else known.table
        if static.streamed:
            slot = jax.lax.rem(item, jnp.int32(2))
            return lambda place: ref[slot, 0, place]
        start = table_I[item]
        return lambda place: ref[start + place]

    def tokens_of(item: jax.Array) -> Any:
        return pl.ds(pl.multiple_of(query_I[item], TILE), static.queries)

    def places_of(j: int, width: int) -> list[tuple[slice, slice]]:
        """Lists rows of row `j` of heads, and which lanes of their tokens are theirs."""
        rows = (i * static.queries for i in range(per_row))
        lanes = ((j * per_row + i) * width for i in range(per_row))
        return [
            (slice(row, row + static.queries), slice(lane, lane + width))
            for row, lane in zip(rows, lanes, strict=True)
        ]

    def fetch_queries(item: jax.Array) -> Any:
        return pltpu.make_async_copy(given.q_TX.at[tokens_of(item)], query, queried)

    def send(item: jax.Array) -> Any:
        return pltpu.make_async_copy(result, out_TX.at[tokens_of(item)], sent)

    def fetch_page(page: jax.Array, i: int, slot: jax.Array) -> list[Any]:
        parts = zip(given.pools.each(), blocks.each(), fetched.each(), strict=True)
        layer = pl.ds(base[0], static.num_pages)
        return [
            pltpu.make_async_copy(pool.at[layer].at[page], part.at[slot, i], done.at[slot])
            for pool, part, done in parts
        ]

    def num_slots(item: jax.Array, number: jax.Array) -> jax.Array:
        return jnp.clip(high_I[item] - low_I[item] - number * slots, 0, slots)

    def fetch(item: jax.Array, number: jax.Array, slot: jax.Array) -> None:
        # Read once: between two DMAs the compiler would read it again.
        page, high = of_pages(item), num_slots(item, number)
        begin = shifted(low_I[item], size) + number * static.block
        for i in range(static.block):
            # Not inside: what scalars say is read beside what comes before.
            copies = fetch_page(page(begin + i), i, slot)
            pl.when(i * size < high)(partial(start_all, copies))

    def await_fetch(item: jax.Array, number: jax.Array, slot: jax.Array) -> None:
        pages_fetched = shifted(num_slots(item, number) + size - 1, size)
        if static.wait_by_page:

            @pl.loop(0, pages_fetched)
            def _(_: jax.Array) -> None:
                wait_all(fetch_page(jnp.int32(0), 0, slot))

            return
        for part, done in zip(blocks.each(), fetched.each(), strict=True):
            arrived = part.at[slot, pl.ds(0, pages_fetched)]
            pltpu.make_async_copy(arrived, arrived, done.at[slot]).wait()

    def clear_tail(high: jax.Array, slot: jax.Array, num_parts: int | jax.Array) -> None:
        """Clears what no one owns of the parts attended: it may be NaN, and 0 x NaN is NaN, so that
        a weight of zero does not clear a value.
        """

        @pl.loop(shifted(high, size), num_parts * static.part)
        def _(i: jax.Array) -> None:
            rows = pl.ds(layout.values, layout.value_rows)
            values = blocks.pages[slot, i, rows]
            held = jax.lax.broadcasted_iota(jnp.int32, values.shape, 1) < high - i * size
            blocks.pages[slot, i, rows] = jnp.where(held, values, jnp.zeros_like(values))

    def all_seen(item: jax.Array, begin: jax.Array, count: int) -> jax.Array:
        """Says whether all queries of the item see the `count` slots from `begin` on."""
        is_seen = begin + count <= slot_I[item] + 1
        if static.windowed:
            begins_at = of_pages(item, first=True)(shifted(begin, size))
            is_seen &= begins_at >= lowest_I[item] + static.queries - 1
        return is_seen

    def seen(item: jax.Array, begin: jax.Array) -> jax.Array:
        distance = distance_RS[...]
        mask = distance <= slot_I[item] - begin
        if not static.windowed:
            return mask
        # Slot of a block to position: its page's first position, less its page's first slot.
        position = of_pages(item, first=True)
        shift = jnp.zeros((1, part_slots), jnp.int32)
        page = div(jax.lax.broadcasted_iota(jnp.int32, (1, part_slots), 1), size)
        for i in range(static.part):
            of_page = position(shifted(begin, size) + i) - i * size
            shift = jnp.where(page == i, of_page, shift)
        return mask & (distance + shift >= lowest_I[item])

    def attend(
        item: jax.Array, number: jax.Array, slot: jax.Array, at: int | jax.Array, *, masked: bool
    ) -> None:
        """Attends the part of a block from its page `at` on. Scores and weights go through VMEM:
        all rows of queries meet a tile of keys while it is in the matmul unit, but a softmax in
        registers wants few rows at a time, and its maximum and its sum a pass each.
        """
        begin = low_I[item] + number * slots + at * size
        held = num_slots(item, number) - at * size
        place = pl.ds(at, static.part)
        block = PerPool(*(None if pool is None else pool.at[slot, place] for pool in blocks))
        held_1S = jax.lax.broadcasted_iota(jnp.int32, (1, part_slots), 1) < held
        for j in range(layout.joined):
            turn = (at // static.part * layout.joined + j if isinstance(at, int) else j) % 2
            scores_RS, weights_RS = scratch.scores[turn], scratch.weights[turn]
            s = scores(q_JRX[j], block, HeadRow(0, j), static)
            scores_RS[...] = jnp.where(seen(item, begin), s, MASKED) if masked else s
            of_values = columns(
                block, HeadRow(0, j), static, of_values=True, held_1S=held_1S if masked else None
            )
            for start in range(0, num_rows, chunk):
                rows = pl.ds(start, chunk)
                old_max = max_JRL[j, rows]
                top = jnp.maximum(old_max, jnp.max(scores_RS[rows], axis=1, keepdims=True))
                shrink = jnp.exp2(old_max - top)
                max_JRL[j, rows] = top
                acc_JRX[j, rows] = acc_JRX[j, rows] * across(shrink, layout.out_width)
                sum_JRL[j, rows] = sum_JRL[j, rows] * shrink
            for start in range(0, num_rows, chunk):
                rows = pl.ds(start, chunk)
                s = scores_RS[rows] - across(max_JRL[j, rows], part_slots)
                p = jnp.exp2(s)
                sum_JRL[j, rows] += across_sum(p)
                weights_RS[rows], added = weights(
                    p, rows_of_columns(of_values, start, chunk), static
                )
                if added is not None:
                    acc_JRX[j, rows] += added
            values = elements(block, layout.values + j, static, of_values=True)
            acc_JRX[j] += dot(weights_RS[...], values, (1, 0))

    def run_block(item: jax.Array, number: jax.Array, num_blocks: jax.Array) -> None:
        slot = jax.lax.rem(steps[0], jnp.int32(2))
        steps[0] = steps[0] + 1
        more = number + 1 < num_blocks
        following = jnp.where(more, item, item + 1)
        if static.streamed:

            @pl.when(jnp.logical_not(more) & (following < num[0]))
            def _() -> None:
                for copy in ask(following):
                    copy.wait()

        pl.when(following < num[0])(
            lambda: fetch(following, jnp.where(more, number + 1, 0), 1 - slot)
        )
        await_fetch(item, number, slot)
        begin, held = low_I[item] + number * slots, num_slots(item, number)
        in_parts = static.block > static.part
        num_parts = div(held + part_slots - 1, part_slots) if in_parts else 1
        if static.packing is None:
            clear_tail(held, slot, num_parts)

        def run_part(at: int | jax.Array) -> None:
            whole = all_seen(item, begin + at * size, part_slots)
            run = partial(attend, item, number, slot, at)
            pl.when(whole)(partial(run, masked=False))
            pl.when(jnp.logical_not(whole))(partial(run, masked=True))

        if not in_parts:
            run_part(0)
            return
        whole = all_seen(item, begin, slots)

        @pl.when(whole)
        def _() -> None:
            # Without a loop: the softmax of one part runs beside the matmuls of the next.
            for at in range(0, static.block, static.part):
                attend(item, number, slot, at, masked=False)

        @pl.when(jnp.logical_not(whole))
        def _() -> None:
            pl.loop(0, num_parts)(lambda i: run_part(i * static.part))

    steps[0] = jnp.int32(0)
    lane = jax.lax.broadcasted_iota(jnp.int32, distance_RS.shape, 1)
    distance_RS[...] = lane - across(given.offset_RL[...], part_slots)

    @pl.when(num[0] > 0)
    def _() -> None:
        fetch_queries(jnp.int32(0)).start()
        if static.streamed:
            for copy in ask(jnp.int32(0)):
                copy.start()
                copy.wait()
        fetch(jnp.int32(0), jnp.int32(0), jnp.int32(0))

    @pl.loop(0, num[0])
    def _(item: jax.Array) -> None:
        fetch_queries(item).wait()
        for j in range(layout.joined):
            for rows, lanes in places_of(j, layout.key_width):
                q_JRX[j, rows] = query[:, lanes]
        max_JRL[...] = given.sinks_JRL[...] if static.sinks else jnp.full_like(max_JRL, MASKED)
        sum_JRL[...] = jnp.full_like(sum_JRL, 1.0 / LANES if static.sinks else 0.0)
        acc_JRX[...] = jnp.zeros_like(acc_JRX)
        if static.streamed:

            @pl.when(item + 1 < num[0])
            def _() -> None:
                for copy in ask(item + 1):
                    copy.start()

        pl.when(item + 1 < num[0])(lambda: fetch_queries(item + 1).start())
        num_blocks = div(high_I[item] - low_I[item] + slots - 1, slots)
        pl.loop(0, num_blocks)(lambda number: run_block(item, number, num_blocks))
        # Blocks run past their chunk into the next one, whose own result has to come later.
        pl.when(item > 0)(lambda: send(item - 1).wait())
        for j in range(layout.joined):
            total = jnp.sum(sum_JRL[j], axis=1, keepdims=True)
            found = (acc_JRX[j] / total).astype(result.dtype)
            for rows, lanes in places_of(j, layout.out_width):
                result[:, lanes] = found[rows]
        send(item).start()

    @pl.when(num[0] > 0)
    def _() -> None:
        send(num[0] - 1).wait()


def prefill_smem_bytes(schedule: Schedule) -> int:
    """Counts scalar memory where tables stay in HBM: for those of the rows of two items."""
    return 2 * 4 * (schedule.table.shape[-1] + schedule.first.shape[-1])


def prefill(
    q_TJMX: jax.Array,
    sinks_JM: jax.Array | None,
    pools: PerPool,
    schedule: Schedule,
    base: jax.Array,
    *,
    static: Static,
    out_dtype: Any = jnp.float32,
    interpret: Any = False,
) -> jax.Array:
    """Returns [T, J, M, X] of the tokens in chunks; anything for the others.

    pools: as of `decode`, with the step's keys and values already. q: in `static.dtype`. base [1]:
    the layer's first row in the pools.
    """
    items = schedule.prefill
    if items is None:
        raise ValueError("expected a schedule that was made with decode_only=False")
    num_tokens, joined, per_row, width = q_TJMX.shape
    num_rows, out_width = static.queries * per_row, static.layout.out_width
    static = replace(static, rows=num_rows, per_row=num_rows)
    q_TX = q_TJMX.reshape(num_tokens, -1)[items.token]
    offset_R1 = jnp.tile(jnp.arange(static.queries, dtype=jnp.int32), per_row)[:, None]
    part_slots = static.part * static.page_size
    lanes = (joined, num_rows, LANES)
    out_lanes = joined * per_row * out_width
    small = (1, 8, LANES)
    if sinks_JM is None:
        sinks_JRL = jnp.zeros(small, jnp.float32)
    else:
        sinks_JRL = jnp.broadcast_to(
            jnp.repeat(sinks_JM * LOG2E, static.queries, axis=1)[:, :, None], lanes
        )
    tables = Tables(schedule.table, schedule.first)
    scalars = Scalars(
        num=items.num,
        table_I=items.table,
        query_I=items.query,
        slot_I=items.slot,
        low_I=items.low,
        high_I=items.high,
        lowest_I=items.lowest,
        base=base,
        tables=None if static.streamed else tables,
    )
    given = Operands(
        tables=tables if static.streamed else None,
        q_TX=q_TX,
        offset_RL=jnp.broadcast_to(offset_R1, (num_rows, LANES)),
        sinks_JRL=sinks_JRL,
        pools=pools,
    )
    in_vmem, in_hbm = pl.BlockSpec(memory_space=pltpu.VMEM), pl.BlockSpec(memory_space=pl.ANY)
    dma = pltpu.SemaphoreType.DMA
    running = pltpu.VMEM(lanes, jnp.float32)
    (out_TX,) = pl.pallas_call(
        partial(_kernel, static),
        name="paged_prefill",
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            in_specs=[
                Operands(
                    tables=jax.tree.map(lambda _: in_hbm, given.tables),
                    q_TX=in_hbm,
                    offset_RL=in_vmem,
                    sinks_JRL=in_vmem,
                    pools=jax.tree.map(lambda _: in_hbm, pools),
                )
            ],
            out_specs=[in_hbm],
            scratch_shapes=[
                Scratch(
                    blocks=jax.tree.map(
                        lambda pool: pltpu.VMEM((2, static.block, *pool.shape[1:]), pool.dtype),
                        pools,
                    ),
                    query=pltpu.VMEM((static.queries, q_TX.shape[1]), static.dtype),
                    q_JRX=pltpu.VMEM((joined, num_rows, width), static.dtype),
                    max_JRL=running,
                    sum_JRL=running,
                    acc_JRX=pltpu.VMEM((joined, num_rows, out_width), jnp.float32),
                    result=pltpu.VMEM((static.queries, out_lanes), out_dtype),
                    steps=pltpu.SMEM((1,), jnp.int32),
                    scores=(pltpu.VMEM((num_rows, part_slots), jnp.float32),) * 2,
                    weights=(pltpu.VMEM((num_rows, part_slots), static.dtype),) * 2,
                    distance_RS=pltpu.VMEM((num_rows, part_slots), jnp.int32),
                    queried=dma,
                    sent=dma,
                    fetched=jax.tree.map(lambda _: dma((2,)), pools),
                    held=jax.tree.map(
                        lambda x: pltpu.SMEM((2, *x.shape[1:]), jnp.int32), given.tables
                    ),
                    asked=dma((2,)) if static.streamed else None,
                )
            ],
        ),
        out_shape=[jax.ShapeDtypeStruct((len(q_TX), out_lanes), out_dtype)],
        compiler_params=compiler_params(vmem_limit_bytes=VMEM_BYTES),
        interpret=interpret,
    )(scalars, given)
    return out_TX[items.where].reshape(num_tokens, joined, per_row, out_width)
