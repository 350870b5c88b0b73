"""Ragged paged attention on a GPU: the one function that an engine calls per layer."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from kernels_pallas.gpu import decode as of_rows
from kernels_pallas.gpu import prefill as of_chunks
from kernels_pallas.gpu.block import LOG2E, MASKED, Pools, Problem
from kernels_pallas.gpu.pages import HEAD_DIMS, Int8Pages
from kernels_pallas.gpu.schedule import DecodeItems, PrefillItems, Schedule, rows_per_query

PAGE_SIZES = (16, 32, 64, 128)
INT8_PAGE_SIZES = (64, 128)
"""A copy to shared memory begins at a multiple of 128 bytes there: the scales of 64 tokens."""
MAX_PER_HEAD = 64
"""Query heads of a KV head, which the kernels work on together."""


Result = tuple[jax.Array, tuple[jax.Array, jax.Array] | None]
"""Out [T, K, G, H] and, where sinks are to join the softmax, its max in units of log 2 and its sum
[T, K, G].
"""


def ragged_paged_attention(
    q_TNH: jax.Array,
    pages: jax.Array | Int8Pages,
    schedule: Schedule,
    *,
    layer: int | jax.Array,
    num_pages: int,
    scale: float,
    softcap: float | None = None,
    sinks_N: jax.Array | None = None,
    interpret: Any = None,
) -> jax.Array:
    """Attends every packed token to the pages of its row, which hold the step's own keys and values
    already.

    Returns [T, N, H] float32. pages: bfloat16 [L*P, 2K, S, H], or int8 numbers
    with scales, page p of layer l in row l * num_pages + p. Queries and softmax weights are rounded
    to bfloat16, sums are float32. Decode rows that rest get zeros, padding tokens anything.
    `schedule` is made for this step's rows and these heads, once for all layers. sinks_N: a logit
    per query head, which joins the softmax's sum only. `interpret`: None or InterpretGPUParams.

    Raises: NotImplementedError naming what the kernels do not take. Semantics:
    kernels_pallas.reference.
    """
    pools = Pools(*pages) if isinstance(pages, Int8Pages) else Pools(pages, None)
    _check(q_TNH, pools)
    num_tokens, num_heads, head_dim = q_TNH.shape
    kv_heads, page_size = pools.pages.shape[1] // 2, pools.pages.shape[2]
    if pools.scales is not None:
        pools = pools._replace(scales=pools.scales.reshape(-1, 2 * kv_heads, page_size))
    q_TKGH = q_TNH.astype(jnp.bfloat16).reshape(num_tokens, kv_heads, -1, head_dim)
    base = jnp.reshape(jnp.asarray(layer * num_pages, jnp.int32), (1,))
    problem = Problem(
        kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        int8=pools.scales is not None,
        scale=scale,
        softcap=softcap,
        sinks=sinks_N is not None,
        num_processors=schedule.num_processors,
        interpret=interpret,
    )
    found = _decode(q_TKGH[: schedule.decode.num_rows], pools, schedule.decode, base, problem)
    if schedule.prefill is not None:
        filled = _prefill(q_TKGH, pools, schedule.prefill, base, problem)
        found = jax.tree.map(lambda x, y: _first_rows(x, y, schedule.num_decode), found, filled)
    out, softmax = found
    if sinks_N is not None and softmax is not None:
        sinks = jnp.broadcast_to(
            sinks_N.astype(jnp.float32).reshape(1, kv_heads, -1) * LOG2E, softmax[0].shape
        )
        out = _add_sinks(out, softmax, sinks)
    return out.reshape(num_tokens, num_heads, head_dim)


def _decode(
    q_DKGH: jax.Array,
    pools: Pools,
    items: DecodeItems,
    base: jax.Array,
    problem: Problem,
) -> Result:
    num_rows, _, group, _ = q_DKGH.shape
    per_head = -(-group // of_rows.COLUMNS) * of_rows.COLUMNS
    static = of_rows.Static(problem=problem, per_head=per_head)
    q_DKMH = jnp.pad(q_DKGH, ((0, 0), (0, 0), (0, static.per_head - group), (0, 0)))
    parts = of_rows.decode(q_DKMH, pools, items, base, static=static)
    # Without the columns that only the matmul wanted.
    parts = jax.tree.map(lambda x: x[..., :group], parts)
    out_DKHG, softmax = _merge(parts, items, num_rows)
    return out_DKHG.swapaxes(2, 3), softmax if problem.sinks else None


def _merge(
    found: of_rows.Partial, items: DecodeItems, num_rows: int
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Merges the parts of each row into one softmax. Source: arXiv 2205.14135, section 3.1."""
    real_I = jnp.arange(items.row.shape[0]) < items.num
    of_row_DI = (items.row[None] == jnp.arange(num_rows)[:, None]) & real_I[None]
    max_IKM = jnp.where(real_I[:, None, None], found.max_IKM, MASKED)
    top_DKM = jnp.where(of_row_DI[:, :, None, None], max_IKM[None], MASKED).max(axis=1)
    share_IKM = jnp.exp2(max_IKM - top_DKM[items.row])

    def add(x_I: jax.Array) -> jax.Array:
        """Adds up [I, ...] -> [D, ...], in the same order each time; what no unit has written may
        be NaN.
        """
        x_I = jnp.where(real_I.reshape(-1, *[1] * (x_I.ndim - 1)), x_I, 0.0)
        return jnp.einsum(
            "di,i...->d...", of_row_DI.astype(jnp.float32), x_I, precision=jax.lax.Precision.HIGHEST
        )

    total_DKM = add(found.sum_IKM * share_IKM)
    # A row that rests has a sum of 0: it gets zeros instead of NaN.
    out_DKHM = (
        add(found.out_IKHM * share_IKM[:, :, None])
        / jnp.where(total_DKM > 0, total_DKM, 1.0)[:, :, None]
    )
    return out_DKHM, (top_DKM, total_DKM)


def _prefill(
    q_TKGH: jax.Array,
    pools: Pools,
    items: PrefillItems,
    base: jax.Array,
    problem: Problem,
) -> Result:
    num_tokens, kv_heads, group, head_dim = q_TKGH.shape
    static = of_chunks.Static(problem=problem, per_head=rows_per_query(group))
    index_IQ = jnp.minimum(items.token[:, None] + jnp.arange(items.size)[None], num_tokens - 1)
    q_IQKGH = jnp.pad(q_TKGH, ((0, 0), (0, 0), (0, static.per_head - group), (0, 0)))[index_IQ]
    q_IKRH = q_IQKGH.transpose(0, 2, 1, 3, 4).reshape(
        len(index_IQ), kv_heads, static.rows, head_dim
    )
    found = of_chunks.prefill(q_IKRH, pools, items, base, static=static)

    def packed(x_IKR: jax.Array) -> jax.Array:
        """Gathers [items, K, R, ...] -> [T, K, G, ...]."""
        x = x_IKR.reshape(*x_IKR.shape[:2], items.size, static.per_head, *x_IKR.shape[3:])[
            :, :, :, :group
        ]
        return jnp.moveaxis(x, 2, 1).reshape(-1, kv_heads, group, *x_IKR.shape[3:])[items.where]

    out, softmax = packed(found.out_IKRH), None
    if found.max_IKR is not None and found.sum_IKR is not None:
        softmax = packed(found.max_IKR), packed(found.sum_IKR)
    return out, softmax


def _first_rows(decoded: jax.Array, filled: jax.Array, num_decode: jax.Array) -> jax.Array:
    """Joins [T, ...]: decode rows are the first packed tokens, every other token is a chunk's."""
    is_decode = jnp.arange(filled.shape[0]) < num_decode
    decoded = jnp.pad(
        decoded, ((0, filled.shape[0] - decoded.shape[0]), *[(0, 0)] * (decoded.ndim - 1))
    )
    return jnp.where(is_decode.reshape(-1, *[1] * (filled.ndim - 1)), decoded, filled)


def _add_sinks(
    out_TKGH: jax.Array, softmax: tuple[jax.Array, jax.Array], sinks_TKG: jax.Array
) -> jax.Array:
    """Adds one more score, without a value, to each softmax."""
    old_top, old_total = softmax
    top = jnp.maximum(old_top, sinks_TKG)
    shrink, share = jnp.exp2(old_top - top), jnp.exp2(sinks_TKG - top)
    total = old_total * shrink + share
    return out_TKGH * (old_total * shrink / total)[..., None]


def _check(q_TNH: jax.Array, pools: Pools) -> None:
    _, num_heads, head_dim = q_TNH.shape
    pages, scales, int8 = pools.pages, pools.scales, pools.scales is not None
    kv_heads, size = pages.shape[1] // 2, pages.shape[2]
    if num_heads % kv_heads or pages.shape[3] != head_dim:
        raise ValueError(
            f"queries: expected a multiple of {kv_heads} heads of {pages.shape[3]}, got "
            f"{q_TNH.shape[1:]}"
        )
    expected = (pages.shape[0], 1, 2 * kv_heads * size)
    if scales is not None and scales.shape != expected:
        raise ValueError(f"scales: expected {expected}, got {scales.shape}")
    wanted = {"pages": jnp.int8 if int8 else jnp.bfloat16, "scales": jnp.bfloat16}
    for name, pool in pools._asdict().items():
        if pool is not None and pool.dtype != wanted[name]:
            expected_dtype = jnp.dtype(wanted[name])
            raise NotImplementedError(f"{name}: expected {expected_dtype}, got {pool.dtype}")
    if head_dim not in HEAD_DIMS:
        raise NotImplementedError(f"head_dim: expected one of {HEAD_DIMS}, got {head_dim}")
    if size not in (sizes := INT8_PAGE_SIZES if int8 else PAGE_SIZES):
        raise NotImplementedError(
            f"page_size: expected one of {sizes}{' for int8' if int8 else ''}, got {size}"
        )
    if num_heads // kv_heads > MAX_PER_HEAD:
        raise NotImplementedError(
            f"heads: expected at most {MAX_PER_HEAD} of a KV head, got {num_heads // kv_heads}"
        )
