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

The list of work is read by `decode_work`, pages are moved by `decode_pages`; here is what is done
with a block (`Attention`), in which order (`_round`), and the call.
"""

from __future__ import annotations

import math
from collections.abc import Callable
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
    HeadRow,
    PerPool,
    Static,
    columns,
    div,
    dot,
    elements,
    scores,
    weights,
)
from kernels_pallas.tpu.checks import compiler_params
from kernels_pallas.tpu.decode_pages import Pages
from kernels_pallas.tpu.decode_work import RECORDS, Held, Work, held_work, streamed_work
from kernels_pallas.tpu.latent import Running, Seen, attend_latent
from kernels_pallas.tpu.layout import LANES, SUBLANES
from kernels_pallas.tpu.schedule import Schedule
from kernels_pallas.tpu.tiles import AHEAD, SLOTS, sizes_attended


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
    """Holds outputs, in VMEM, and the pools. found_DJML: the softmax of each query so far, its
    maximum in the first half of the lanes, then its sum; None: nobody asks.
    """

    out_DJMX: Any
    found_DJML: Any
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


class Part(NamedTuple):
    """Names what is attended of an item: pages from the first one of its block on, their slots.
    row, first: of the item, read once, since between two DMAs the compiler would read them again.
    """

    item: jax.Array
    row: jax.Array
    first: jax.Array
    pages: PerPool
    slots: Any


class Block(NamedTuple):
    """Holds one block's softmax, relative to its own max: [M, 1] each. added: to all elements of
    its values' sum.
    """

    top: jax.Array
    sum: jax.Array
    added: jax.Array | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Attention:
    """Attends blocks, and merges each into the running softmax of its row."""

    static: Static
    work: Work
    given: Operands
    scratch: Scratch
    results: Results

    def attend(self, item: jax.Array, block: PerPool, pages: int) -> None:
        """Attends the first `pages` of a block."""
        static, row, first = self.static, self.work.row(item), self.work.first(item) > 0
        if static.layout.kind == "latent":
            self._attend_latent(item, row, first, block)
            return
        if pages < static.block:
            block = block._replace(pages=block.pages.at[pl.ds(0, pages)])
        part = Part(item, row, first, block, pl.ds(0, pages * static.page_size))

        # Softmaxes run beside the matmuls of other rows of heads. Their weights wait in VMEM:
        # registers would spill.
        def attend_heads(begin: int | jax.Array) -> None:
            pending: list[tuple[HeadRow, Block]] = []
            for j in range(static.heads):
                at = HeadRow(begin, j)
                pending.append((at, self._weigh(part, at)))
                if len(pending) > AHEAD:
                    self._merge(part, *pending.pop(0))
            for each in pending:
                self._merge(part, *each)

        if static.heads == static.layout.joined:
            attend_heads(0)
        else:
            pl.loop(0, static.layout.joined, step=static.heads)(attend_heads)

    def _weigh(self, part: Part, at: HeadRow) -> Block:
        """Takes the block's own softmax for the queries of a row of heads."""
        static, work, item, j = self.static, self.work, part.item, at.number
        # Read back for each row of heads: kept in registers it makes the others spill.
        place = (
            self.scratch.slot_MS[:, part.slots]
            if static.layout.joined > 1
            else jax.lax.broadcasted_iota(jnp.int32, (static.rows, part.slots.size), 1)
        )
        seen = place < work.high(item)
        if static.windowed:
            seen &= place >= work.low(item)
        q_MX = self.given.q_DJMX[part.row, j]
        s = jnp.where(seen, scores(q_MX, part.pages, at, static), MASKED)
        top = jnp.max(s, axis=1, keepdims=True)
        p = jnp.exp2(s - top)
        held_1S = place[:1] < work.high(item)
        of_values = columns(part.pages, at, static, of_values=True, held_1S=held_1S)
        self.scratch.weights_JMS[j, :, part.slots], added = weights(p, of_values, static)
        return Block(top, jnp.sum(p, axis=1, keepdims=True), added)

    def _merge(self, part: Part, at: HeadRow, new: Block) -> None:
        """Adds the block's values to the row's, and writes what they come to so far."""
        static, scratch, first, j = self.static, self.scratch, part.first, at.number
        values = elements(part.pages, static.layout.values + j, static, of_values=True)
        gained = dot(scratch.weights_JMS[j, :, part.slots], values, (1, 0))
        gained = gained if new.added is None else gained + new.added
        nothing = self.given.sinks_JMX[j] if static.sinks else MASKED
        old_max = jnp.where(first, nothing, scratch.max_JMX[j])
        old_sum = jnp.where(first, 1.0 if static.sinks else 0.0, scratch.sum_JMX[j])
        top = jnp.maximum(old_max, new.top)
        shrink, share = jnp.exp2(old_max - top), jnp.exp2(new.top - top)
        total = old_sum * shrink + new.sum * share
        acc = jnp.where(first, 0.0, scratch.acc_JMX[j]) * shrink + gained * share
        scratch.max_JMX[j], scratch.sum_JMX[j], scratch.acc_JMX[j] = top, total, acc
        self.results.out_DJMX[part.row, j] = acc / total
        if self.results.found_DJML is not None:
            lane_ML = jax.lax.broadcasted_iota(jnp.int32, (static.rows, LANES), 1)
            found_ML = jnp.where(lane_ML < LANES // 2, top[:, :LANES], total[:, :LANES])
            self.results.found_DJML[part.row, j] = found_ML

    def _attend_latent(
        self, item: jax.Array, row: jax.Array, first: jax.Array, block: PerPool
    ) -> None:
        work, scratch, (out_DJMX, found_DJML, _) = self.work, self.scratch, self.results
        attend_latent(
            self.static,
            self.given.q_DJMX[row, 0],
            block,
            Seen(work.low(item), work.high(item), first),
            Running(scratch.max_JMX.at[0], scratch.sum_JMX.at[0], scratch.acc_JMX.at[0]),
            scratch.weights_JMS.at[0],
            out_DJMX.at[row, 0],
            None if found_DJML is None else found_DJML.at[row, 0],
        )


def _kernel(
    static: Static, scalars: Scalars, given: Operands, results: Results, scratch: Scratch
) -> None:
    if scalars.held is None:
        work = streamed_work(given.records, scratch.ring, scratch.asked)
    else:
        work = held_work(scalars.held)
    blocks = [
        PerPool(*(None if buffers is None else buffers[slot] for buffers in scratch.blocks))
        for slot in range(SLOTS)
    ]
    pages = Pages(
        static=static,
        work=work,
        base=scalars.base,
        pools=results.pools,
        blocks=blocks,
        new=given.new,
        fetched=scratch.fetched,
        written=scratch.written,
    )
    attention = Attention(static=static, work=work, given=given, scratch=scratch, results=results)
    if static.layout.kind != "latent":
        shape = scratch.slot_MS.shape
        scratch.slot_MS[...] = jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    results.out_DJMX[...] = jnp.zeros_like(results.out_DJMX)
    if results.found_DJML is not None:  # of a row that has nothing here
        lane = jax.lax.broadcasted_iota(jnp.int32, results.found_DJML.shape, 3)
        results.found_DJML[...] = jnp.where(lane < LANES // 2, MASKED, 0.0)
    work.begin()
    for slot in range(SLOTS - 1):
        pages.fetch(jnp.int32(slot), slot)
    rounds = div(scalars.num[0] + SLOTS - 1, SLOTS)
    pl.loop(0, rounds)(partial(_round, static, work, pages, attention))
    pages.await_write(rounds * SLOTS - 1, SLOTS - 1)
    work.end(rounds * SLOTS)


def _round(
    static: Static, work: Work, pages: Pages, attention: Attention, number: jax.Array
) -> None:
    """Works on one block in each slot."""
    packing, block = static.packing, static.block
    sizes = sizes_attended(
        block, layout=static.layout, itemsize=static.dtype.itemsize, packing=packing
    )

    def work_on(item: jax.Array, slot: int, attended: int) -> None:
        pages.store_new(item, slot)
        pages.start_write(item, slot)
        before = (slot - 1) % SLOTS
        pages.await_write(item - 1, before)
        pages.fetch(item + SLOTS - 1, before)
        attention.attend(item, pages.blocks[slot], attended)

    def run_whole(item: jax.Array, slot: int, *, clears: bool) -> None:
        work.await_next(item)
        pages.await_fetch(item, slot)
        if clears:
            pages.clear_tail(item, slot, block)
        work_on(item, slot, block)

    def run_part(item: jax.Array, slot: int) -> None:
        work.await_next(item)
        pages.await_fetch(item, slot)
        attended = _pages_attended(work.high(item), sizes, static.page_size)
        pages.clear_tail(item, slot, attended)
        pl.when(attended == 0)(partial(pages.await_write, item - 1, (slot - 1) % SLOTS))
        # All of it for each size: what is issued together has to be in one basic block.
        for size in sizes:
            pl.when(attended == size)(partial(work_on, item, slot, size))

    def each(run: Callable[[jax.Array, int], None]) -> None:
        for slot in range(SLOTS):
            run(number * SLOTS + slot, slot)

    if len(sizes) == 1:
        each(partial(run_whole, clears=packing is None))
        return
    held = sum(work.high(number * SLOTS + slot) for slot in range(SLOTS))
    is_full = held == SLOTS * static.slots
    pl.when(is_full)(partial(each, partial(run_whole, clears=False)))
    pl.when(jnp.logical_not(is_full))(partial(each, run_part))


def _pages_attended(high: jax.Array, sizes: list[int], page_size: int) -> jax.Array:
    """Returns the fewest of `sizes` that hold slots < high, 0 for none: a block past the last."""
    attended = jnp.int32(sizes[-1])
    for pages in reversed([0, *sizes[:-1]]):
        attended = jnp.where(high <= pages * page_size, pages, attended)
    return attended


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
) -> tuple[jax.Array, jax.Array | None, PerPool]:
    """Returns (out [D, J, M, X] float32, softmaxes, pools). Softmaxes: where `static.is_part`, the
    maximum, of scores times log2(e), and the sum of each, [D, J, M, 2] float32; else None.

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
    out_lanes = layout.out_width + (LANES if static.is_part else 0)
    vmem_bytes = (
        q_DJMX.dtype.itemsize * q_DJMX.size
        + 4 * num_rows * joined * padded * out_lanes
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
    rows = q_DJMX.shape[:3]
    out = Results(
        jax.ShapeDtypeStruct((*rows, layout.out_width), jnp.float32),
        jax.ShapeDtypeStruct((*rows, LANES), jnp.float32) if static.is_part else None,
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
            out_specs=[Results(in_vmem, in_vmem if static.is_part else None, pool_specs)],
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
        input_output_aliases={before + i: 1 + static.is_part + i for i in range(len(pools.each()))},
        compiler_params=compiler_params(vmem_limit_bytes=VMEM_BYTES),
        interpret=interpret,
    )(scalars, given)
    softmaxes = None
    if static.is_part:
        softmaxes = found.found_DJML[:, :, :per_row, :: LANES // 2]
    return found.out_DJMX[:, :, :per_row], softmaxes, found.pools
