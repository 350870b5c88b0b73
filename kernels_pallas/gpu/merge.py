"""Merges the partial softmaxes that decode leaves of a row into its attention (flash-decoding; the
sums are those of arXiv 2205.14135, section 3.1).

One small kernel, in Triton: as operations of XLA the same is a dozen kernels, which took longer
than attention itself where rows are few. A program has a row, COLUMNS query heads of a KV head and
some of head_dim, and goes through the row's parts in order, PARTS at a time.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from kernels_pallas.gpu.block import MASKED
from kernels_pallas.gpu.decode import COLUMNS, Partial
from kernels_pallas.gpu.schedule import DecodeItems

PARTS, WIDTH = 8, 32
"""Parts that are read at once, and numbers of head_dim that a program has."""


def _kernel(
    sinks_KM: Any, first_D: Any, parts_D: Any, found: Partial, out_DKGH: Any, *, pieces: int
) -> None:
    row, head, place = (pl.program_id(axis) for axis in range(3))
    at_M = place // pieces * COLUMNS + jnp.arange(COLUMNS)
    at_H = place % pieces * WIDTH + jnp.arange(WIDTH)
    begin, end = first_D[row], first_D[row] + parts_D[row]

    def add(step: jax.Array, carry: tuple) -> tuple:
        top_M, total_M, acc_HM = carry
        at_P = begin + step * PARTS + jnp.arange(PARTS)
        # What no unit has written may be NaN.
        is_own_P = at_P < end
        of_part = (at_P[:, None], head, at_M[None])
        is_own_PM = jnp.broadcast_to(is_own_P[:, None], (PARTS, COLUMNS))
        max_PM = pltriton.load(found.max_IKM.at[of_part], mask=is_own_PM, other=MASKED)
        sum_PM = pltriton.load(found.sum_IKM.at[of_part], mask=is_own_PM, other=0.0)
        x_PHM = pltriton.load(
            found.out_IKHM.at[at_P[:, None, None], head, at_H[None, :, None], at_M[None, None]],
            mask=jnp.broadcast_to(is_own_P[:, None, None], (PARTS, WIDTH, COLUMNS)),
            other=0.0,
        )
        new_M = jnp.maximum(top_M, max_PM.max(axis=0))
        shrink_M, share_PM = jnp.exp2(top_M - new_M), jnp.exp2(max_PM - new_M[None])
        total_M = total_M * shrink_M + (sum_PM * share_PM).sum(axis=0)
        acc_HM = acc_HM * shrink_M[None] + (x_PHM * share_PM[:, None]).sum(axis=0)
        return new_M, total_M, acc_HM

    if sinks_KM is None:
        begins = jnp.full(COLUMNS, MASKED, jnp.float32), jnp.zeros(COLUMNS, jnp.float32)
    else:  # a score of its own that has no value
        begins = sinks_KM[head, at_M], jnp.ones(COLUMNS, jnp.float32)
    nothing_HM = jnp.zeros((WIDTH, COLUMNS), jnp.float32)
    num_steps = pl.cdiv(end - begin, PARTS)
    _, total_M, acc_HM = jax.lax.fori_loop(0, num_steps, add, (*begins, nothing_HM))
    # A row that rests has a sum of 0: it gets zeros instead of NaN.
    out_HM = acc_HM / jnp.where(total_M > 0, total_M, 1.0)[None]
    is_head_HM = jnp.broadcast_to((at_M < out_DKGH.shape[2])[None], (WIDTH, COLUMNS))
    pltriton.store(
        out_DKGH.at[row, head, at_M[None], at_H[:, None]],
        out_HM.astype(out_DKGH.dtype),
        mask=is_head_HM,
    )


def merge(
    found: Partial,
    items: DecodeItems,
    sinks_KG: jax.Array | None,
    *,
    group: int,
    dtype: Any,
    interpret: bool,
) -> jax.Array:
    """Merges what `decode` found: [rows, K, G, H] of `dtype`, for the `group` heads G of a KV head.
    Rows without items get zeros. sinks: a score in units of log 2 for each head, which joins the
    sum.
    """
    _, kv_heads, head_dim, per_head = found.out_IKHM.shape
    if sinks_KG is not None:
        sinks_KG = jnp.pad(sinks_KG, ((0, 0), (0, per_head - group)))
    pieces = head_dim // WIDTH
    return pl.pallas_call(
        partial(_kernel, pieces=pieces),
        out_shape=jax.ShapeDtypeStruct((items.num_rows, kv_heads, group, head_dim), dtype),
        grid=(items.num_rows, kv_heads, per_head // COLUMNS * pieces),
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="merge_parts",
    )(sinks_KG, items.first, items.parts, found)
