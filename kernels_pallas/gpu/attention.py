"""Ragged paged attention on a GPU: the one function that an engine calls per layer."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kernels_pallas.gpu import decode as of_rows
from kernels_pallas.gpu import prefill as of_chunks
from kernels_pallas.gpu.block import LOG2E, MASKED
from kernels_pallas.gpu.schedule import TILE, DecodeItems, PrefillItems, Schedule, rows_per_query

HEAD_DIMS = (64, 128, 256)
PAGE_SIZES = (16, 32, 64, 128)
INT8_PAGE_SIZES = (64, 128)
"""A copy to shared memory begins at a multiple of 128 bytes there: the scales of 64 tokens."""
MAX_PER_HEAD = 64
"""Query heads of a KV head, which the kernels work on together."""

MAX_PER_HEAD_WITH_MASS = 32
"""With 64 registers spill."""


class Int8Pages(NamedTuple):
    """numbers [L*P, 2K, S, H] int8; scales [L*P, 1, 2K * S] bfloat16, head by head, by which their
    vectors are multiplied.
    """

    numbers: jax.Array
    scales: jax.Array


class Statistics(NamedTuple):
    """Of the softmax of each packed token and query head, as `kernels_pallas.reference.Statistics`
    has them; [T, N].

    mass_BNW: each decode row's weights summed over table page w (0 for pages it does not hold or
    see); None unless asked for.
    """

    max_TN: jax.Array
    sum_TN: jax.Array
    entropy_TN: jax.Array
    mass_BNW: jax.Array | None


Result = tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array] | None]
"""Out [T, K, G, H] and max, sum and entropy accumulator [T, K, G] in units of log 2, without
sinks.
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
    statistics: bool = False,
    page_mass: bool = False,
    interpret: Any = None,
) -> tuple[jax.Array, Statistics | None]:
    """Attends every packed token to the pages of its row, which hold the step's own keys and values
    already.

    -> (out [T, N, H] float32, statistics or None). pages: bfloat16 [L*P, 2K, S, H], or int8 numbers
    with scales, page p of layer l in row l * num_pages + p. Queries and softmax weights are rounded
    to bfloat16, sums are float32. Decode rows that rest get zeros, padding tokens anything.
    `schedule` is made for this step's rows and these heads,
    once for all layers. sinks_N: a logit per query head, which joins the softmax's sum only.
    page_mass: statistics with
    masses, of a step of decode rows only. `interpret`: None or InterpretGPUParams.

    Raises: NotImplementedError naming what the kernels do not take. Semantics:
    kernels_pallas.reference.
    """
    pools = tuple(pages) if isinstance(pages, Int8Pages) else (pages,)
    _check(q_TNH, pools, schedule, page_mass)
    statistics |= page_mass
    num_tokens, num_heads, head_dim = q_TNH.shape
    kv_heads, page_size = pools[0].shape[1] // 2, pools[0].shape[2]
    pools = (pools[0], *(scales.reshape(-1, 2 * kv_heads, page_size) for scales in pools[1:]))
    wants = statistics or sinks_N is not None
    q_TKGH = q_TNH.astype(jnp.bfloat16).reshape(num_tokens, kv_heads, -1, head_dim)
    base = jnp.reshape(jnp.asarray(layer * num_pages, jnp.int32), (1,))
    known: dict[str, Any] = {"kv_heads": kv_heads, "head_dim": head_dim, "page_size": page_size}
    known |= {"scale": scale, "softcap": softcap, "statistics": wants, "interpret": interpret}
    known |= {"num_processors": schedule.num_processors, "int8": len(pools) > 1}
    num_rows = schedule.decode.num_rows
    (out, found), mass_DKtPG = _decode(
        q_TKGH[:num_rows], pools, schedule.decode, base, known, page_mass
    )
    if schedule.prefill is not None:
        filled = _prefill(q_TKGH, pools, schedule.prefill, base, known)
        out, found = jax.tree.map(
            lambda x, y: _first_rows(x, y, schedule.num_decode), (out, found), filled
        )
    if found is None:
        return out.reshape(num_tokens, num_heads, head_dim), None
    if sinks_N is not None:
        sinks = jnp.broadcast_to(
            sinks_N.astype(jnp.float32).reshape(1, kv_heads, -1) * LOG2E, found[0].shape
        )
        out, found = _add_sinks(out, found, sinks)
    out_TNH, (top, total, entropy) = out.reshape(num_tokens, num_heads, head_dim), found
    if not statistics:
        return out_TNH, None
    mass_BNW = (
        None
        if mass_DKtPG is None
        else _mass_per_page(mass_DKtPG, (top, total), schedule.decode, page_size)
    )
    per_head = [x.reshape(num_tokens, num_heads) for x in (top / LOG2E, total, entropy / LOG2E)]
    return out_TNH, Statistics(per_head[0], per_head[1], per_head[2], mass_BNW)


def _decode(
    q_DKGH: jax.Array,
    pools: tuple[jax.Array, ...],
    items: DecodeItems,
    base: jax.Array,
    known: dict[str, Any],
    page_mass: bool,
) -> tuple[Result, jax.Array | None]:
    num_rows, _, group, _ = q_DKGH.shape
    per_head = -(-group // of_rows.COLUMNS) * of_rows.COLUMNS
    static = of_rows.Static(per_head=per_head, page_mass=page_mass, **known)
    q_DKMH = jnp.pad(q_DKGH, ((0, 0), (0, 0), (0, static.per_head - group), (0, 0)))
    parts = of_rows.decode(q_DKMH, pools, items, base, static=static)
    # Without the columns that only the matmul wanted.
    parts = jax.tree.map(lambda x: x[..., :group], parts)
    out_DKHG, found = _merge(parts, items, num_rows)
    return (out_DKHG.swapaxes(2, 3), found), parts.mass_DKtPM


def _mass_per_page(
    mass_DKtPG: jax.Array, softmax: tuple[jax.Array, jax.Array], items: DecodeItems, page_size: int
) -> jax.Array:
    """[B, N, W]: sums relative to the max that each tile's item had come to -> weights, at the
    row's table pages.
    """
    num_rows, kv_heads, num_tiles, _, group = mass_DKtPG.shape
    top_DKG, total_DKG = softmax
    share_DKtG = jnp.exp2(mass_DKtPG[:, :, :, -1] - top_DKG[:, :, None]) / total_DKG[:, :, None]
    # What no item has written may be NaN.
    real_I = jnp.arange(items.row.shape[0]) < items.num
    row_I = jnp.where(real_I, items.row, num_rows)
    begin_D = (
        jnp.full(num_rows, num_tiles, jnp.int32).at[row_I].min(items.begin // TILE, mode="drop")
    )
    end_D = (
        jnp.zeros(num_rows, jnp.int32).at[row_I].max(items.begin // TILE + items.tiles, mode="drop")
    )
    tile = jnp.arange(num_tiles)[None]
    written_Dt = (tile >= begin_D[:, None]) & (tile < end_D[:, None])
    written_DKtPG = written_Dt[:, None, :, None, None]
    mass_DKtPG = jnp.where(written_DKtPG, mass_DKtPG[:, :, :, :-1] * share_DKtG[:, :, :, None], 0.0)
    # Parts of a tile, one after the other, are pages, or tiles are parts of a page.
    mass_DKxG = mass_DKtPG.reshape(num_rows, kv_heads, -1, group)
    per_page = max(1, page_size // TILE)
    mass_DKWG = (
        mass_DKxG[:, :, : items.width * per_page]
        .reshape(num_rows, kv_heads, -1, per_page, group)
        .sum(axis=3)
    )
    return mass_DKWG.swapaxes(2, 3).reshape(num_rows, kv_heads * group, items.width)


def _merge(found: of_rows.Partial, items: DecodeItems, num_rows: int) -> Result:
    """The parts of each row as one softmax. Source: arXiv 2205.14135, section 3.1."""
    real_I = jnp.arange(items.row.shape[0]) < items.num
    of_row_DI = (items.row[None] == jnp.arange(num_rows)[:, None]) & real_I[None]
    max_IKM = jnp.where(real_I[:, None, None], found.max_IKM, MASKED)
    top_DKM = jnp.where(of_row_DI[:, :, None, None], max_IKM[None], MASKED).max(axis=1)
    below_IKM = max_IKM - top_DKM[items.row]
    share_IKM = jnp.exp2(below_IKM)

    def add(x_I: jax.Array) -> jax.Array:
        """[I, ...] -> [D, ...], in the same order each time. What no unit has written may be
        NaN.
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
    if found.entropy_IKM is None:
        return out_DKHM, None
    return out_DKHM, (
        top_DKM,
        total_DKM,
        add((found.entropy_IKM + found.sum_IKM * below_IKM) * share_IKM),
    )


def _prefill(
    q_TKGH: jax.Array,
    pools: tuple[jax.Array, ...],
    items: PrefillItems,
    base: jax.Array,
    known: dict[str, Any],
) -> Result:
    num_tokens, kv_heads, group, head_dim = q_TKGH.shape
    static = of_chunks.Static(per_head=rows_per_query(group), **known)
    index_IQ = jnp.minimum(items.token[:, None] + jnp.arange(items.size)[None], num_tokens - 1)
    q_IQKGH = jnp.pad(q_TKGH, ((0, 0), (0, 0), (0, static.per_head - group), (0, 0)))[index_IQ]
    q_IKRH = q_IQKGH.transpose(0, 2, 1, 3, 4).reshape(
        len(index_IQ), kv_heads, static.rows, head_dim
    )
    out, *found = of_chunks.prefill(q_IKRH, pools, items, base, static=static)

    def packed(x_IKR: jax.Array) -> jax.Array:
        """[items, K, R, ...] -> [T, K, G, ...]"""
        x = x_IKR.reshape(*x_IKR.shape[:2], items.size, static.per_head, *x_IKR.shape[3:])[
            :, :, :, :group
        ]
        return jnp.moveaxis(x, 2, 1).reshape(-1, kv_heads, group, *x_IKR.shape[3:])[items.where]

    return packed(out), (packed(found[0]), packed(found[1]), packed(found[2])) if found else None


def _first_rows(decoded: jax.Array, filled: jax.Array, num_decode: jax.Array) -> jax.Array:
    """[T, ...]: decode rows are the first packed tokens, every other token is a chunk's."""
    is_decode = jnp.arange(filled.shape[0]) < num_decode
    decoded = jnp.pad(
        decoded, ((0, filled.shape[0] - decoded.shape[0]), *[(0, 0)] * (decoded.ndim - 1))
    )
    return jnp.where(is_decode.reshape(-1, *[1] * (filled.ndim - 1)), decoded, filled)


def _add_sinks(
    out_TKGH: jax.Array, found: tuple[jax.Array, ...], sinks_TKG: jax.Array
) -> tuple[jax.Array, Any]:
    """One more score, without a value, in each softmax."""
    old_top, old_total, old_entropy = found
    top = jnp.maximum(old_top, sinks_TKG)
    shrink, share = jnp.exp2(old_top - top), jnp.exp2(sinks_TKG - top)
    total = old_total * shrink + share
    entropy = shrink * (old_entropy + old_total * (old_top - top)) + share * (sinks_TKG - top)
    return out_TKGH * (old_total * shrink / total)[..., None], (top, total, entropy)


def _check(
    q_TNH: jax.Array, pools: tuple[jax.Array, ...], schedule: Schedule, page_mass: bool
) -> None:
    _, num_heads, head_dim = q_TNH.shape
    pages, int8 = pools[0], len(pools) > 1
    kv_heads, size = pages.shape[1] // 2, pages.shape[2]
    if num_heads % kv_heads or pages.shape[3] != head_dim:
        raise ValueError(
            f"queries: expected a multiple of {kv_heads} heads of {pages.shape[3]}, got "
            f"{q_TNH.shape[1:]}"
        )
    if int8 and pools[1].shape != (expected := (pages.shape[0], 1, 2 * kv_heads * size)):
        raise ValueError(f"scales: expected {expected}, got {pools[1].shape}")
    dtypes = (jnp.int8, jnp.bfloat16) if int8 else (jnp.bfloat16,)
    for name, pool, dtype in zip(("pages", "scales"), pools, dtypes, strict=False):
        if pool.dtype != dtype:
            raise NotImplementedError(f"{name}: expected {jnp.dtype(dtype)}, got {pool.dtype}")
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
    if page_mass and schedule.prefill is not None:
        raise NotImplementedError(
            "page_mass: expected a step of decode rows only, got one with prefill chunks"
        )
    if page_mass and num_heads // kv_heads > MAX_PER_HEAD_WITH_MASS:
        most = f"at most {MAX_PER_HEAD_WITH_MASS} query heads of a KV head"
        raise NotImplementedError(f"page_mass: expected {most}, got {num_heads // kv_heads}")
