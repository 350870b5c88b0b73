"""Attends a block of latent pages during decode: one row per token is the key of every query head,
and its first numbers are the value, so that a page is fetched once for both.

With many heads the matmul unit is what is busy. So a block is taken in parts: the scores of the
parts that come next are made while the softmax of one runs, and its values follow. All parts share
one running maximum (arXiv 2205.14135, algorithm 1).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from kernels_pallas.tpu.block import (
    MASKED,
    HeadRow,
    PerPool,
    Static,
    across,
    across_sum,
    columns,
    dot,
    elements,
    scores,
    weights,
)
from kernels_pallas.tpu.layout import LANES
from kernels_pallas.tpu.tiles import LATENT_AHEAD, LATENT_TOKENS

HEAD = HeadRow(0, 0)


class Running(NamedTuple):
    """Holds the softmax of a row so far: its maximum, equal in all lanes, its sum, whose lanes are
    still to be added up, and the sum of its values.
    """

    max_ML: Any
    sum_ML: Any
    acc_MX: Any


class Seen(NamedTuple):
    """Says which slots of the block the row's query sees, low <= slot < high, and whether the block
    is the row's first.
    """

    low: jax.Array
    high: jax.Array
    first: jax.Array


def attend_latent(
    static: Static,
    q_MX: jax.Array,
    block: PerPool,
    seen: Seen,
    running: Running,
    weights_MS: Any,
    out_MX: Any,
    found_ML: Any,
) -> None:
    """Adds a block to the running softmax of its row, and writes what it comes to so far.

    found_ML: gets the maximum, in the first half of the lanes, and the sum; None: nobody asks.
    """
    size, out_width = static.page_size, static.layout.out_width
    pages = max(n for n in range(1, static.block + 1) if fits_part(static, n))
    slots = pages * size
    num_parts = static.block // pages

    def part_of(number: int) -> PerPool:
        own = pl.ds(number * pages, pages)
        return PerPool(*(None if pool is None else pool.at[own] for pool in block))

    def weigh(
        number: int, top: jax.Array, total: jax.Array
    ) -> tuple[jax.Array, jax.Array, tuple[jax.Array, ...]]:
        """Returns maximum and sum with this part, and what acts on the values before it."""
        part = part_of(number)
        place_1S = number * slots + jax.lax.broadcasted_iota(jnp.int32, (1, slots), 1)
        held_1S = place_1S < seen.high
        seen_1S = held_1S & (place_1S >= seen.low) if static.windowed else held_1S
        s_MS = jnp.where(seen_1S, scores(q_MX, part, HEAD, static), MASKED)
        new_top = jnp.maximum(top, jnp.max(s_MS, axis=1, keepdims=True))
        shrink = jnp.exp2(top - new_top)
        p_MS = jnp.exp2(s_MS - across(new_top, slots))
        of_values = columns(part, HEAD, static, of_values=True, held_1S=held_1S)
        stored, added = weights(p_MS, of_values, static)
        weights_MS[:, pl.ds(number * slots, slots)] = stored
        acts = (shrink,) if added is None else (shrink, added)
        return new_top, total * shrink + across_sum(p_MS), acts

    def merge(number: int, shrink: jax.Array, added: jax.Array | float = 0.0) -> None:
        values = elements(part_of(number), 0, static, of_values=True)
        gained = dot(weights_MS[:, pl.ds(number * slots, slots)], values, (1, 0))
        before = running.acc_MX[...]
        before = jnp.where(seen.first, 0.0, before) if number == 0 else before
        running.acc_MX[...] = before * across(shrink, out_width) + (gained + added)

    top = jnp.where(seen.first, MASKED, running.max_ML[...])
    total = jnp.where(seen.first, 0.0, running.sum_ML[...])
    pending: list[tuple[int, tuple[jax.Array, ...]]] = []
    for number in range(num_parts):
        top, total, acts = weigh(number, top, total)
        pending.append((number, acts))
        if len(pending) > LATENT_AHEAD:
            done, its = pending.pop(0)
            merge(done, *its)
    for done, its in pending:
        merge(done, *its)
    running.max_ML[...], running.sum_ML[...] = top, total
    total_M1 = jnp.sum(total, axis=1, keepdims=True)
    out_MX[...] = running.acc_MX[...] / total_M1
    if found_ML is not None:
        lane_ML = jax.lax.broadcasted_iota(jnp.int32, top.shape, 1)
        found_ML[...] = jnp.where(lane_ML < LANES // 2, top, total_M1)


def fits_part(static: Static, pages: int) -> bool:
    """Tells whether a block can be taken in parts of so many pages."""
    return static.block % pages == 0 and (pages == 1 or pages * static.page_size <= LATENT_TOKENS)
