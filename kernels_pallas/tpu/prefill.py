"""Paged attention of prefill chunks: blocks of queries against the pages of their row, which hold
the step's own keys and values already. Flash attention, arXiv 2205.14135, algorithm 1, with the
pages fetched one block ahead.

The list of work is read by `prefill_work`; pages, queries and results are moved by `prefill_pages`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
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
from kernels_pallas.tpu.prefill_pages import Pages, Tokens
from kernels_pallas.tpu.prefill_work import Scalars, Tables, Work
from kernels_pallas.tpu.schedule import Schedule

CHUNK = 64
"""Query rows, at most, whose scores are worked on together."""


def rows_of_columns(x: Columns | None, start: int, count: int) -> Columns | None:
    """Takes those of the queries from `start` on, where they differ."""
    if x is None:
        return None
    return jax.tree.map(lambda y: y if y.shape[0] == 1 else y[start : start + count], x)


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Attention:
    """Attends an item's blocks, and keeps the running softmax of its rows of queries."""

    static: Static
    work: Work
    pages: Pages
    scratch: Scratch

    def begin(self, offset_RL: jax.Array) -> None:
        """Begins with no block attended, and with how far each slot is behind a query's token."""
        distance_RS = self.scratch.distance_RS
        self.scratch.steps[0] = jnp.int32(0)
        lane = jax.lax.broadcasted_iota(jnp.int32, distance_RS.shape, 1)
        distance_RS[...] = lane - across(offset_RL, distance_RS.shape[1])

    def begin_item(self, sinks_JRL: Any) -> None:
        """Begins the softmax of an item's rows: with nothing, or with the sinks."""
        scratch, sinks = self.scratch, self.static.sinks
        top = sinks_JRL[...] if sinks else jnp.full_like(scratch.max_JRL, MASKED)
        scratch.max_JRL[...] = top
        scratch.sum_JRL[...] = jnp.full_like(scratch.sum_JRL, 1.0 / LANES if sinks else 0.0)
        scratch.acc_JRX[...] = jnp.zeros_like(scratch.acc_JRX)

    def attend_block(self, item: jax.Array, number: jax.Array, num_blocks: jax.Array) -> None:
        """Attends a block, and has the one that follows fetched: the item's next, or the first of
        the next item.
        """
        static, work, steps = self.static, self.work, self.scratch.steps
        slot = jax.lax.rem(steps[0], jnp.int32(2))
        steps[0] = steps[0] + 1
        more = number + 1 < num_blocks
        following = jnp.where(more, item, item + 1)
        if static.streamed:

            @pl.when(jnp.logical_not(more) & (following < work.num))
            def _() -> None:
                wait_all(work.ask(following))

        pl.when(following < work.num)(
            lambda: self.pages.fetch(following, jnp.where(more, number + 1, 0), 1 - slot)
        )
        self.pages.await_fetch(item, number, slot)
        begin, held = work.begin(item, number), work.num_slots(item, number)
        in_parts = static.block > static.part
        part_slots = static.part * static.page_size
        num_parts = div(held + part_slots - 1, part_slots) if in_parts else 1
        if static.packing is None:
            self.pages.clear_tail(held, slot, num_parts)

        def attend_part(at: int | jax.Array) -> None:
            whole = self._all_seen(item, begin + at * static.page_size, part_slots)
            attend = partial(self._attend, item, number, slot, at)
            pl.when(whole)(partial(attend, masked=False))
            pl.when(jnp.logical_not(whole))(partial(attend, masked=True))

        if not in_parts:
            attend_part(0)
            return
        whole = self._all_seen(item, begin, static.slots)

        @pl.when(whole)
        def _() -> None:
            # Without a loop: the softmax of one part runs beside the matmuls of the next.
            for at in range(0, static.block, static.part):
                self._attend(item, number, slot, at, masked=False)

        @pl.when(jnp.logical_not(whole))
        def _() -> None:
            pl.loop(0, num_parts)(lambda i: attend_part(i * static.part))

    def result(self, j: int, dtype: Any) -> jax.Array:
        """Returns what row `j` of heads has come to, [R, X]."""
        total = jnp.sum(self.scratch.sum_JRL[j], axis=1, keepdims=True)
        return (self.scratch.acc_JRX[j] / total).astype(dtype)

    def _all_seen(self, item: jax.Array, begin: jax.Array, count: int) -> jax.Array:
        """Says whether all queries of the item see the `count` slots from `begin` on."""
        items, static = self.work.items, self.static
        is_seen = begin + count <= items.slot_I[item] + 1
        if static.windowed:
            begins_at = self.work.of_pages(item, first=True)(shifted(begin, static.page_size))
            is_seen &= begins_at >= items.lowest_I[item] + static.queries - 1
        return is_seen

    def _seen(self, item: jax.Array, begin: jax.Array) -> jax.Array:
        """Says which queries see which slots of the part from `begin` on, [R, S]."""
        items, static, size = self.work.items, self.static, self.static.page_size
        distance = self.scratch.distance_RS[...]
        mask = distance <= items.slot_I[item] - begin
        if not static.windowed:
            return mask
        # Slot of a block to position: its page's first position, less its page's first slot.
        position = self.work.of_pages(item, first=True)
        shape = (1, static.part * size)
        shift = jnp.zeros(shape, jnp.int32)
        page = div(jax.lax.broadcasted_iota(jnp.int32, shape, 1), size)
        for i in range(static.part):
            of_page = position(shifted(begin, size) + i) - i * size
            shift = jnp.where(page == i, of_page, shift)
        return mask & (distance + shift >= items.lowest_I[item])

    def _attend(
        self,
        item: jax.Array,
        number: jax.Array,
        slot: jax.Array,
        at: int | jax.Array,
        *,
        masked: bool,
    ) -> None:
        """Attends the part of a block from its page `at` on. Scores and weights go through VMEM:
        all rows of queries meet a tile of keys while it is in the matmul unit, but a softmax in
        registers wants few rows at a time, and its maximum and its sum a pass each.
        """
        static, scratch, layout = self.static, self.scratch, self.static.layout
        part_slots = static.part * static.page_size
        begin = self.work.begin(item, number) + at * static.page_size
        held = self.work.num_slots(item, number) - at * static.page_size
        place = pl.ds(at, static.part)
        pools = self.pages.blocks
        block = PerPool(*(None if pool is None else pool.at[slot, place] for pool in pools))
        held_1S = jax.lax.broadcasted_iota(jnp.int32, (1, part_slots), 1) < held
        for j in range(layout.joined):
            turn = (at // static.part * layout.joined + j if isinstance(at, int) else j) % 2
            scores_RS, weights_RS = scratch.scores[turn], scratch.weights[turn]
            s = scores(scratch.q_JRX[j], block, HeadRow(0, j), static)
            scores_RS[...] = jnp.where(self._seen(item, begin), s, MASKED) if masked else s
            of_values = columns(
                block, HeadRow(0, j), static, of_values=True, held_1S=held_1S if masked else None
            )
            self._weigh(j, scores_RS, weights_RS, of_values)
            values = elements(block, layout.values + j, static, of_values=True)
            scratch.acc_JRX[j] += dot(weights_RS[...], values, (1, 0))

    def _weigh(self, j: int, scores_RS: Any, weights_RS: Any, of_values: Columns | None) -> None:
        """Turns scores into weights, with the running softmax of row `j` of heads brought to a
        common maximum with them.
        """
        static, scratch = self.static, self.scratch
        max_JRL, sum_JRL, acc_JRX = scratch.max_JRL, scratch.sum_JRL, scratch.acc_JRX
        num_rows, num_slots = scores_RS.shape
        chunk = max(rows for rows in range(16, CHUNK + 1, 16) if num_rows % rows == 0)
        for start in range(0, num_rows, chunk):
            rows = pl.ds(start, chunk)
            old_max = max_JRL[j, rows]
            top = jnp.maximum(old_max, jnp.max(scores_RS[rows], axis=1, keepdims=True))
            shrink = jnp.exp2(old_max - top)
            max_JRL[j, rows] = top
            acc_JRX[j, rows] = acc_JRX[j, rows] * across(shrink, static.layout.out_width)
            sum_JRL[j, rows] = sum_JRL[j, rows] * shrink
        for start in range(0, num_rows, chunk):
            rows = pl.ds(start, chunk)
            p = jnp.exp2(scores_RS[rows] - across(max_JRL[j, rows], num_slots))
            sum_JRL[j, rows] += across_sum(p)
            weights_RS[rows], added = weights(p, rows_of_columns(of_values, start, chunk), static)
            if added is not None:
                acc_JRX[j, rows] += added


def _kernel(
    static: Static, scalars: Scalars, given: Operands, out_TX: Any, scratch: Scratch
) -> None:
    work = Work(
        static=static,
        items=scalars,
        tables=given.tables if static.streamed else scalars.tables,
        held=scratch.held,
        asked=scratch.asked,
    )
    pages = Pages(
        static=static,
        work=work,
        pools=given.pools,
        blocks=scratch.blocks,
        fetched=scratch.fetched,
    )
    tokens = Tokens(
        static=static,
        work=work,
        q_TX=given.q_TX,
        out_TX=out_TX,
        query=scratch.query,
        result=scratch.result,
        queried=scratch.queried,
        sent=scratch.sent,
    )
    attention = Attention(static=static, work=work, pages=pages, scratch=scratch)
    attention.begin(given.offset_RL[...])

    @pl.when(work.num > 0)
    def _() -> None:
        tokens.fetch(jnp.int32(0)).start()
        if static.streamed:
            for copy in work.ask(jnp.int32(0)):
                copy.start()
                copy.wait()
        pages.fetch(jnp.int32(0), jnp.int32(0), jnp.int32(0))

    @pl.loop(0, work.num)
    def _(item: jax.Array) -> None:
        tokens.fetch(item).wait()
        tokens.take(scratch.q_JRX)
        attention.begin_item(given.sinks_JRL)
        if static.streamed:
            pl.when(item + 1 < work.num)(lambda: start_all(work.ask(item + 1)))
        pl.when(item + 1 < work.num)(lambda: tokens.fetch(item + 1).start())
        num_blocks = work.num_blocks(item)
        pl.loop(0, num_blocks)(lambda number: attention.attend_block(item, number, num_blocks))
        # Blocks run past their chunk into the next one, whose own result has to come later.
        pl.when(item > 0)(lambda: tokens.send(item - 1).wait())
        for j in range(static.layout.joined):
            tokens.put(j, attention.result(j, scratch.result.dtype))
        tokens.send(item).start()

    @pl.when(work.num > 0)
    def _() -> None:
        tokens.send(work.num - 1).wait()


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
