"""Paged attention of prefill chunks: blocks of queries against the pages of their row, which hold
the step's own keys and values already. Flash attention, arXiv 2205.14135, algorithm 1, with the
pages fetched one block ahead.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.tpu.block import (
    LOG2E,
    MASKED,
    VMEM_BYTES,
    Columns,
    Fetched,
    HeadRow,
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
from kernels_pallas.tpu.layout import LANES
from kernels_pallas.tpu.schedule import Schedule

CHUNK = 64
"""Query rows, at most, whose scores are worked on together."""


def across(x_RL: jax.Array, width: int) -> jax.Array:
    """[R, LANES], equal in all lanes, as [R, width]."""
    copies = -(-width // LANES)
    return (jnp.concatenate([x_RL] * copies, axis=1) if copies > 1 else x_RL)[:, :width]


def across_sum(x_RS: jax.Array) -> jax.Array:
    """[R, S] -> [R, LANES]: every LANES-th term. Lanes are added up once, at the end."""
    width = x_RS.shape[1]
    x_RS = jnp.pad(x_RS, ((0, 0), (0, -width % LANES)))
    total = x_RS[:, :LANES]
    for i in range(LANES, width, LANES):
        total += x_RS[:, i : i + LANES]
    return total


def rows_of_columns(x: Columns | None, start: int, count: int) -> Columns | None:
    """Of the queries from `start` on, where they differ."""
    if x is None:
        return None
    return jax.tree.map(lambda y: y if y.shape[0] == 1 else y[start : start + count], x)


def _kernel(static: Static, *refs: Any) -> None:
    num, table_I, query_I, slot_I, low_I, high_I, position_I, base, *tables = refs[:10]
    rest = list(refs[10:])
    if static.streamed:
        *rest, held_table, held_first, asked = rest
    num_pools = 1 if static.packing is None else 2
    (q_JRX, offset_RL, sinks_JRL), pools, rest = (
        rest[:3],
        rest[3 : 3 + num_pools],
        rest[3 + num_pools :],
    )
    out_JRX, blocks, rest = rest[0], rest[1 : 1 + num_pools], rest[1 + num_pools :]
    query, max_JRL, sum_JRL, acc_JRX, result, steps = rest[:6]
    staged, distance_RS = rest[6:10], rest[10]
    queried, sent, *fetched = rest[11:]
    layout, size, slots = static.layout, static.page_size, static.slots
    num_rows = query.shape[2]
    per_token = num_rows // static.queries
    chunk = max(rows for rows in range(16, CHUNK + 1, 16) if num_rows % rows == 0)

    def ask(item: jax.Array) -> list[Any]:
        """What fetches the tables of an item's row, where they are not in scalar memory."""
        slot = jax.lax.rem(item, jnp.int32(2))
        held = (held_table, held_first) if static.window is not None else (held_table,)
        copies = zip(tables, held, strict=False)
        return [
            pltpu.make_async_copy(x.at[table_I[item]], y.at[slot], asked.at[slot])
            for x, y in copies
        ]

    def page_of(item: jax.Array, page: jax.Array, *, first: bool = False) -> jax.Array:
        """The id of a page of the item's row, or its first position."""
        if static.streamed:
            return (held_first if first else held_table)[jax.lax.rem(item, jnp.int32(2)), 0, page]
        return tables[first][table_I[item] + page]

    def rows_of(item: jax.Array) -> Any:
        return pl.ds(pl.multiple_of(query_I[item] * per_token, 16), num_rows)

    def fetch_queries(item: jax.Array) -> Any:
        slot = jax.lax.rem(item, jnp.int32(2))
        return pltpu.make_async_copy(q_JRX.at[:, rows_of(item)], query.at[slot], queried.at[slot])

    def send(item: jax.Array) -> Any:
        return pltpu.make_async_copy(result, out_JRX.at[:, rows_of(item)], sent)

    def fetch_page(item: jax.Array, number: jax.Array, i: int, slot: jax.Array) -> list[Any]:
        page = base[0] + page_of(item, div(low_I[item], size) + number * static.block + i)
        parts = zip(pools, blocks, fetched, strict=True)
        return [
            pltpu.make_async_copy(pool.at[page], part.at[slot, i], done.at[slot])
            for pool, part, done in parts
        ]

    def num_slots(item: jax.Array, number: jax.Array) -> jax.Array:
        return jnp.clip(high_I[item] - low_I[item] - number * slots, 0, slots)

    def fetch(item: jax.Array, number: jax.Array, slot: jax.Array) -> None:
        for i in range(static.block):
            copies = fetch_page(
                item, number, i, slot
            )  # not inside: scalars are read beside what comes before
            pl.when(i * size < num_slots(item, number))(partial(start_all, copies))

    def await_fetch(item: jax.Array, number: jax.Array, slot: jax.Array) -> None:
        pages_fetched = div(num_slots(item, number) + size - 1, size)
        if static.wait_by_page:

            @pl.loop(0, pages_fetched)
            def _(_: jax.Array) -> None:
                wait_all(fetch_page(item, number, 0, slot))

            return
        for part, done in zip(blocks, fetched, strict=True):
            arrived = part.at[slot, pl.ds(0, pages_fetched)]
            pltpu.make_async_copy(arrived, arrived, done.at[slot]).wait()

    def clear_tail(item: jax.Array, number: jax.Array, slot: jax.Array) -> None:
        """What no one owns may be NaN, and 0 x NaN is NaN: a weight of zero does not clear a
        value.
        """
        high = num_slots(item, number)

        @pl.loop(div(high, size), static.block)
        def _(i: jax.Array) -> None:
            rows = pl.ds(layout.values, layout.joined)
            values = blocks[0][slot, i, rows]
            held = jax.lax.broadcasted_iota(jnp.int32, values.shape, 1) < high - i * size
            blocks[0][slot, i, rows] = jnp.where(held, values, jnp.zeros_like(values))

    def seen(item: jax.Array, number: jax.Array) -> jax.Array:
        begin = low_I[item] + number * slots
        distance = distance_RS[...]
        mask = distance <= slot_I[item] - begin
        if static.window is None:
            return mask
        # Slot of a block to position: its page's first position, less its page's first slot.
        shift = jnp.zeros((1, slots), jnp.int32)
        page = div(jax.lax.broadcasted_iota(jnp.int32, (1, slots), 1), size)
        for i in range(static.block):
            of_page = page_of(item, div(begin, size) + i, first=True) - i * size
            shift = jnp.where(page == i, of_page, shift)
        return mask & (distance + shift > position_I[item] - static.window)

    def attend(item: jax.Array, number: jax.Array, slot: jax.Array, masked: bool) -> None:
        """Scores and weights go through VMEM: all rows of queries meet a tile of keys while it is
        in the matmul unit, but a softmax in registers wants few rows at a time, and its maximum and
        its sum a pass each.
        """
        block = Fetched(*(part.at[slot] for part in blocks), *[None] * (2 - num_pools))
        held_1S = jax.lax.broadcasted_iota(jnp.int32, (1, slots), 1) < num_slots(item, number)
        for j in range(layout.joined):
            scores_RS, weights_RS = staged[j % 2], staged[2 + j % 2]
            s = scores(query[jax.lax.rem(item, jnp.int32(2)), j], block, HeadRow(0, j), static)
            scores_RS[...] = jnp.where(seen(item, number), s, MASKED) if masked else s
            of_values = columns(
                block, HeadRow(0, j), static, of_values=True, held_1S=held_1S if masked else None
            )
            for start in range(0, num_rows, chunk):
                rows = pl.ds(start, chunk)
                old_max = max_JRL[j, rows]
                top = jnp.maximum(old_max, jnp.max(scores_RS[rows], axis=1, keepdims=True))
                shrink = jnp.exp2(old_max - top)
                max_JRL[j, rows] = top
                acc_JRX[j, rows] = acc_JRX[j, rows] * across(shrink, layout.width)
                sum_JRL[j, rows] = sum_JRL[j, rows] * shrink
            for start in range(0, num_rows, chunk):
                rows = pl.ds(start, chunk)
                s = scores_RS[rows] - across(max_JRL[j, rows], slots)
                p = jnp.exp2(s)
                sum_JRL[j, rows] += across_sum(p)
                weights_RS[rows], added = weights(
                    p, rows_of_columns(of_values, start, chunk), static
                )
                if added is not None:
                    acc_JRX[j, rows] += added
            acc_JRX[j] += dot(weights_RS[...], elements(block, layout.values + j, static), (1, 0))

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
        if static.packing is None:
            clear_tail(item, number, slot)
        begin = low_I[item] + number * slots
        whole = begin + slots <= slot_I[item] + 1
        if static.window is not None:
            begins_at = page_of(item, div(begin, size), first=True)
            whole &= begins_at > position_I[item] + static.queries - 1 - static.window
        pl.when(whole)(lambda: attend(item, number, slot, masked=False))
        pl.when(jnp.logical_not(whole))(lambda: attend(item, number, slot, masked=True))

    steps[0] = jnp.int32(0)
    lane = jax.lax.broadcasted_iota(jnp.int32, distance_RS.shape, 1)
    distance_RS[...] = lane - across(offset_RL[...], slots)

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
        if static.streamed:

            @pl.when(item + 1 < num[0])
            def _() -> None:
                for copy in ask(item + 1):
                    copy.start()

        pl.when(item + 1 < num[0])(lambda: fetch_queries(item + 1).start())
        max_JRL[...] = sinks_JRL[...] if static.sinks else jnp.full_like(max_JRL, MASKED)
        sum_JRL[...] = jnp.full_like(sum_JRL, 1.0 / LANES if static.sinks else 0.0)
        acc_JRX[...] = jnp.zeros_like(acc_JRX)
        num_blocks = div(high_I[item] - low_I[item] + slots - 1, slots)
        pl.loop(0, num_blocks)(lambda number: run_block(item, number, num_blocks))
        # Blocks run past their chunk into the next one, whose own result has to come later.
        pl.when(item > 0)(lambda: send(item - 1).wait())
        for j in range(layout.joined):
            total = jnp.sum(sum_JRL[j], axis=1, keepdims=True)
            result[j] = (acc_JRX[j] / total).astype(result.dtype)
        send(item).start()

    @pl.when(num[0] > 0)
    def _() -> None:
        send(num[0] - 1).wait()


def prefill_smem_bytes(schedule: Schedule) -> int:
    """Of scalar memory, where tables stay in HBM: those of the rows of two items."""
    return 2 * 4 * (schedule.table.shape[-1] + schedule.first.shape[-1])


def prefill(
    q_TJMX: jax.Array,
    sinks_JM: jax.Array | None,
    pools: tuple[jax.Array, ...],
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
    _, joined, per_row, width = q_TJMX.shape
    num_rows = static.queries * per_row
    static = replace(static, rows=num_rows)
    q_JRX = q_TJMX[items.token].transpose(1, 0, 2, 3).reshape(joined, -1, width)
    offset_R1 = jnp.repeat(jnp.arange(static.queries, dtype=jnp.int32), per_row)[:, None]
    lanes = (joined, num_rows, LANES)
    small = (1, 8, LANES)
    if sinks_JM is None:
        sinks_JRL = jnp.zeros(small, jnp.float32)
    else:
        sinks_JRL = jnp.broadcast_to(
            jnp.tile(sinks_JM * LOG2E, (1, static.queries))[:, :, None], lanes
        )
    work = (items.num, items.table, items.query, items.slot, items.low, items.high, items.position)
    scalars, tables = [*work, base], [schedule.table, schedule.first]
    if not static.streamed:
        scalars, tables = [*scalars, *tables], []
    in_vmem, in_hbm = pl.BlockSpec(memory_space=pltpu.VMEM), pl.BlockSpec(memory_space=pl.ANY)
    dma = pltpu.SemaphoreType.DMA
    (out_JRX,) = pl.pallas_call(
        partial(_kernel, static),
        name="paged_prefill",
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            in_specs=[*[in_hbm] * len(tables), in_hbm, in_vmem, in_vmem, *[in_hbm] * len(pools)],
            out_specs=[in_hbm],
            scratch_shapes=[
                *[pltpu.VMEM((2, static.block, *pool.shape[1:]), pool.dtype) for pool in pools],
                pltpu.VMEM((2, joined, num_rows, width), static.dtype),
                *[pltpu.VMEM(lanes, jnp.float32)] * 2,
                pltpu.VMEM((joined, num_rows, width), jnp.float32),
                pltpu.VMEM((joined, num_rows, width), out_dtype),
                pltpu.SMEM((1,), jnp.int32),
                *[pltpu.VMEM((num_rows, static.slots), jnp.float32)] * 2,
                *[pltpu.VMEM((num_rows, static.slots), static.dtype)] * 2,
                pltpu.VMEM((num_rows, static.slots), jnp.int32),
                *[dma((2,)), dma, *[dma((2,))] * len(pools)],
                *[pltpu.SMEM((2, *x.shape[1:]), jnp.int32) for x in tables],
                *[dma((2,)) for _ in tables[:1]],
            ],
        ),
        out_shape=[jax.ShapeDtypeStruct(q_JRX.shape, out_dtype)],
        compiler_params=pltpu.CompilerParams(
            vmem_limit_bytes=VMEM_BYTES, disable_bounds_checks=True, disable_semaphore_checks=True
        ),
        interpret=interpret,
    )(*scalars, *tables, q_JRX, jnp.broadcast_to(offset_R1, (num_rows, LANES)), sinks_JRL, *pools)

    out_RJMX = out_JRX.reshape(joined, -1, per_row, width).transpose(1, 0, 2, 3)
    return out_RJMX[items.where]
