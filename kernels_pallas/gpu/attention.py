"""Ragged paged attention on a GPU: the one function that an engine calls per layer."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from kernels_pallas.gpu import decode as of_rows
from kernels_pallas.gpu import prefill as of_chunks
from kernels_pallas.gpu.block import LOG2E, SUMS, Pools, Problem, Queries
from kernels_pallas.gpu.merge import merge
from kernels_pallas.gpu.pages import HEAD_DIMS, QuantisedPages
from kernels_pallas.gpu.schedule import DecodeItems, PrefillItems, Schedule, rows_per_query
from kernels_pallas.rows import first_rows

PAGE_SIZES = (16, 32, 64, 128)
QUANTISED_PAGE_SIZES = (64, 128)
"""A copy to shared memory begins at a multiple of 128 bytes there: the scales of 64 tokens."""
MAX_PER_HEAD = 64
"""Query heads of a KV head, which the kernels work on together."""


def ragged_paged_attention(
    q_TNH: jax.Array,
    pages: jax.Array | QuantisedPages,
    schedule: Schedule,
    *,
    layer: int | jax.Array,
    num_pages: int,
    scale: float,
    softcap: float | None = None,
    sinks_N: jax.Array | None = None,
    out_dtype: Any = jnp.float32,
    interpret: Any = None,
) -> jax.Array:
    """Attends every packed token to the pages of its row, which hold the step's own keys and values
    already.

    Returns [T, N, H] of `out_dtype`. pages: bfloat16 [L*P, 2K, S, H], or numbers with scales, page
    p of layer l in row l * num_pages + p. Queries and softmax weights are rounded to bfloat16, sums
    are float32. Decode rows that rest get zeros, padding tokens anything.
    `schedule` is made for this step's rows and these heads, once for all layers. sinks_N: a logit
    per query head, which joins the softmax's sum only. `interpret`: None or InterpretGPUParams.

    Raises: NotImplementedError naming what the kernels do not take. Semantics:
    kernels_pallas.reference.
    """
    num_bits = _check(q_TNH, pages)
    pools = Pools(*pages) if isinstance(pages, QuantisedPages) else Pools(pages, None)
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
        num_bits=num_bits,
        scale=scale,
        softcap=softcap,
        sinks=sinks_N is not None,
        num_processors=schedule.num_processors,
        interpret=interpret,
    )
    sinks_KG = None
    if sinks_N is not None:
        sinks_KG = sinks_N.astype(jnp.float32).reshape(kv_heads, -1) * LOG2E
    rows = q_TKGH[: schedule.decode.num_rows]
    out = _decode(rows, pools, schedule.decode, base, sinks_KG, problem, out_dtype)
    if schedule.prefill is not None:
        filled = _prefill(q_TKGH, pools, schedule.prefill, base, sinks_KG, problem)
        out = first_rows(out, filled.astype(out_dtype), schedule.num_decode)
    return out.reshape(num_tokens, num_heads, head_dim)


def _decode(
    q_DKGH: jax.Array,
    pools: Pools,
    items: DecodeItems,
    base: jax.Array,
    sinks_KG: jax.Array | None,
    problem: Problem,
    dtype: Any,
) -> jax.Array:
    group = q_DKGH.shape[2]
    per_head = -(-group // of_rows.COLUMNS) * of_rows.COLUMNS
    static = of_rows.Static(problem=problem, per_head=per_head)
    q_DKMH = jnp.pad(q_DKGH, ((0, 0), (0, 0), (0, static.per_head - group), (0, 0)))
    queries = _queries(q_DKMH, problem)
    found = of_rows.decode(queries, pools, items, base, static=static)
    interpret = bool(problem.interpret)
    return merge(found, items, sinks_KG, group=group, dtype=dtype, interpret=interpret)


def _prefill(
    q_TKGH: jax.Array,
    pools: Pools,
    items: PrefillItems,
    base: jax.Array,
    sinks_KG: jax.Array | None,
    problem: Problem,
) -> jax.Array:
    num_tokens, kv_heads, group, head_dim = q_TKGH.shape
    static = of_chunks.Static(problem=problem, per_head=rows_per_query(group))
    index_IQ = jnp.minimum(items.token[:, None] + jnp.arange(items.size)[None], num_tokens - 1)
    q_IQKGH = jnp.pad(q_TKGH, ((0, 0), (0, 0), (0, static.per_head - group), (0, 0)))[index_IQ]
    q_IKRH = q_IQKGH.transpose(0, 2, 1, 3, 4).reshape(
        len(index_IQ), kv_heads, static.rows, head_dim
    )
    queries = _queries(q_IKRH, problem)
    found = of_chunks.prefill(queries, pools, items, base, static=static)

    def packed(x_IKR: jax.Array) -> jax.Array:
        """Gathers [items, K, R, ...] -> [T, K, G, ...]."""
        x = x_IKR.reshape(*x_IKR.shape[:2], items.size, static.per_head, *x_IKR.shape[3:])[
            :, :, :, :group
        ]
        return jnp.moveaxis(x, 2, 1).reshape(-1, kv_heads, group, *x_IKR.shape[3:])[items.where]

    out = packed(found.out_IKRH)
    if sinks_KG is None:
        return out
    return _add_sinks(out, packed(found.max_IKR), packed(found.sum_IKR), sinks_KG[None])


def _queries(q: jax.Array, problem: Problem) -> Queries:
    if not problem.has_offsets:
        return Queries(q, None)
    sums = q.astype(jnp.float32).sum(axis=-1)
    return Queries(q, jnp.pad(sums, [(0, 0)] * 2 + [(0, -sums.shape[-1] % SUMS)]))


def _add_sinks(
    out_TKGH: jax.Array, old_top_TKG: jax.Array, old_total_TKG: jax.Array, sinks_1KG: jax.Array
) -> jax.Array:
    """Adds one more score, without a value, to each softmax, of which there are the max in units of
    log 2 and the sum.
    """
    top = jnp.maximum(old_top_TKG, sinks_1KG)
    shrink, share = jnp.exp2(old_top_TKG - top), jnp.exp2(sinks_1KG - top)
    total = old_total_TKG * shrink + share
    return out_TKGH * (old_total_TKG * shrink / total)[..., None]


def _check(q_TNH: jax.Array, pages: jax.Array | QuantisedPages) -> int:
    """Returns the bits of a number. Raises: as `ragged_paged_attention`."""
    _, num_heads, head_dim = q_TNH.shape
    num_bits, of_codec = 16, ""
    sizes: tuple[int, ...] = PAGE_SIZES
    wanted: dict[str, Any] = {"pages": jnp.bfloat16}
    given: dict[str, Any] = {"pages": pages}
    if isinstance(pages, QuantisedPages):
        num_bits, sizes = pages.num_bits, QUANTISED_PAGE_SIZES
        of_codec = f" for int{num_bits}"
        given = {"pages": pages.numbers, "scales": pages.scales}
        wanted = {"pages": jnp.int8, "scales": jnp.int32 if num_bits == 4 else jnp.bfloat16}
    num_pages, num_vectors, size, num_columns = given["pages"].shape
    kv_heads, own_dim = num_vectors // 2, num_columns * (2 if num_bits == 4 else 1)
    if num_heads % kv_heads or own_dim != head_dim:
        raise ValueError(
            f"queries: expected a multiple of {kv_heads} heads of {own_dim}, got {q_TNH.shape[1:]}"
        )
    expected = (num_pages, 1, num_vectors * size)
    if "scales" in given and given["scales"].shape != expected:
        raise ValueError(f"scales: expected {expected}, got {given['scales'].shape}")
    for name, pool in given.items():
        if pool.dtype != wanted[name]:
            expected_dtype = jnp.dtype(wanted[name])
            raise NotImplementedError(f"{name}: expected {expected_dtype}, got {pool.dtype}")
    if head_dim not in HEAD_DIMS:
        raise NotImplementedError(f"head_dim: expected one of {HEAD_DIMS}, got {head_dim}")
    if size not in sizes:
        raise NotImplementedError(f"page_size: expected one of {sizes}{of_codec}, got {size}")
    if num_heads // kv_heads > MAX_PER_HEAD:
        raise NotImplementedError(
            f"heads: expected at most {MAX_PER_HEAD} of a KV head, got {num_heads // kv_heads}"
        )
    return num_bits
