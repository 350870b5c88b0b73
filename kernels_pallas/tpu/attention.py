"""Ragged paged attention: the one function that an engine calls per layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kernels_pallas.rows import first_rows
from kernels_pallas.tpu.block import LOG2E, PerPool, Static
from kernels_pallas.tpu.decode import decode
from kernels_pallas.tpu.layout import (
    Layout,
    latent_layout_of,
    layout_of,
    pack,
    pack_queries,
    unpack_outputs,
)
from kernels_pallas.tpu.packing import Packed, Packing, Quantised, in_slots, pack_new, packing_of
from kernels_pallas.tpu.prefill import prefill
from kernels_pallas.tpu.prefill_work import prefill_smem_bytes
from kernels_pallas.tpu.schedule import SMEM_BYTES, Schedule
from kernels_pallas.tpu.write import write

PAGE_SIZES = (16, 32, 64, 128)


def ragged_paged_attention(
    q_TNH: jax.Array,
    k_TKH: jax.Array | Quantised,
    v_TKH: jax.Array | Quantised,
    pages: jax.Array | Packed,
    schedule: Schedule,
    *,
    layer: int | jax.Array,
    num_pages: int,
    scale: float,
    softcap: float | None = None,
    sinks_N: jax.Array | None = None,
    out_dtype: Any = jnp.float32,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array | Packed]:
    """Writes the step's keys and values into their pages and attends every packed token to the
    pages of its row.

    -> (out [T, N, H], pages). pages: `pack(layout_of(...), [L*P, 2K, S, H])`,
    bfloat16 or float32, page p of layer l in row l * num_pages + p; updated in place when donated.
    Queries, keys, values and softmax weights are rounded to the dtype of the pages, sums are
    float32. Quantised keys and values go into packed pages, queries and weights are then rounded to
    bfloat16. Decode rows that rest get zeros, padding tokens anything. `schedule` is made for this
    step's rows, by `make_schedule`, once for all layers. sinks_N: a logit per query head, which
    joins the softmax's sum only. out_dtype: what the float32 result is rounded to.
    `interpret`: False, True or pltpu.InterpretParams.

    Raises: NotImplementedError naming what the kernels do not take. Semantics:
    kernels_pallas.reference.
    """
    layout = layout_of(kv_heads=_shape(k_TKH)[1], head_dim=_shape(k_TKH)[2])
    both: Any = jax.tree.map(lambda k, v: jnp.concatenate([k, v], axis=1), k_TKH, v_TKH)
    out_TNH, _, pages = _attention(
        layout,
        q_TNH,
        both,
        pages,
        schedule,
        layer=layer,
        num_pages=num_pages,
        scale=scale,
        softcap=softcap,
        sinks_N=sinks_N,
        out_dtype=out_dtype,
        interpret=interpret,
    )
    return out_TNH, pages


def ragged_latent_attention(
    q_TNX: jax.Array,
    row_TX: jax.Array | Quantised,
    pages: jax.Array | Packed,
    schedule: Schedule,
    *,
    rank: int,
    layer: int | jax.Array,
    num_pages: int,
    scale: float,
    out_dtype: Any = jnp.float32,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array | Packed]:
    """Writes the step's latent rows into their pages and attends every packed token to the pages
    of its row: all heads share one key, the row, and one value, its first `rank` numbers, so that a
    page is read once for both.

    -> (out [T, N, rank], pages). q [T, N, X], X a multiple of 128; where a row is padded to X, its
    zeros or the query's keep the scores. pages: `pack(latent_layout_of(...), [L*P, 1, S, X])`; all
    else as of `ragged_paged_attention`.

    Raises: NotImplementedError naming what the kernels do not take. Semantics:
    kernels_pallas.reference.ragged_paged_attention with each row as its own value, of whose results
    the first `rank` numbers count. Source: arXiv 2405.04434, section 2.1, its up-projections
    absorbed into queries and outputs.
    """
    out_TNX, _, pages = _attention(
        latent_layout_of(width=_shape(row_TX)[1], rank=rank),
        q_TNX,
        jax.tree.map(lambda x: x[:, None], row_TX),
        pages,
        schedule,
        layer=layer,
        num_pages=num_pages,
        scale=scale,
        out_dtype=out_dtype,
        interpret=interpret,
    )
    return out_TNX, pages


class DecodePart(NamedTuple):
    """Holds what decode rows find in a part of their pages: out [B, N, H] as if it were all, with H
    the numbers of a value, and the maximum and the sum [B, N] of each softmax, of natural
    exponentials; a row with nothing in this part has zeros, and a maximum below every score. All
    float32.
    """

    out_BNH: jax.Array
    max_BN: jax.Array
    sum_BN: jax.Array


def paged_decode_part(
    q_BNH: jax.Array,
    k_BKH: jax.Array,
    v_BKH: jax.Array,
    pages: jax.Array,
    schedule: Schedule,
    *,
    layer: int | jax.Array,
    num_pages: int,
    scale: float,
    softcap: float | None = None,
    interpret: Any = False,
) -> tuple[DecodePart, jax.Array]:
    """Attends decode rows to those of their keys and values that are in `pages`, where others lie
    elsewhere: results of all parts are one softmax (arXiv 2205.14135, section 3.1).

    `schedule`: of steps that only decode, with the lengths of the rows in these pages; what it says
    of a step's own keys (`make_schedule`, `writes_B`) decides which of them are stored here. All
    else as of `ragged_paged_attention`.

    Raises: as that, and ValueError for a schedule of chunks.
    """
    return _decode_part(
        layout_of(kv_heads=k_BKH.shape[1], head_dim=k_BKH.shape[2]),
        q_BNH,
        jnp.concatenate([k_BKH, v_BKH], axis=1),
        pages,
        schedule,
        layer=layer,
        num_pages=num_pages,
        scale=scale,
        softcap=softcap,
        interpret=interpret,
    )


def latent_decode_part(
    q_BNX: jax.Array,
    row_BX: jax.Array,
    pages: jax.Array,
    schedule: Schedule,
    *,
    rank: int,
    layer: int | jax.Array,
    num_pages: int,
    scale: float,
    interpret: Any = False,
) -> tuple[DecodePart, jax.Array]:
    """Attends decode rows to those of their latent rows that are in `pages`, as `paged_decode_part`
    does to keys; all else as of `ragged_latent_attention`.

    Raises: as these.
    """
    return _decode_part(
        latent_layout_of(width=row_BX.shape[1], rank=rank),
        q_BNX,
        row_BX[:, None],
        pages,
        schedule,
        layer=layer,
        num_pages=num_pages,
        scale=scale,
        softcap=None,
        interpret=interpret,
    )


def _decode_part(
    layout: Layout,
    q_BNH: jax.Array,
    new: jax.Array,
    pages: jax.Array,
    schedule: Schedule,
    *,
    layer: int | jax.Array,
    num_pages: int,
    scale: float,
    softcap: float | None,
    interpret: Any,
) -> tuple[DecodePart, jax.Array]:
    """Attends as `_attention` does, and tells of the softmaxes."""
    if schedule.write is not None:
        raise ValueError("schedule: expected one of steps that only decode, got one with chunks")
    out_BNH, softmaxes, pages = _attention(
        layout,
        q_BNH,
        new,
        pages,
        schedule,
        layer=layer,
        num_pages=num_pages,
        scale=scale,
        softcap=softcap,
        is_part=True,
        out_dtype=jnp.float32,
        interpret=interpret,
    )
    max_BN, sum_BN = (softmaxes[..., i].reshape(q_BNH.shape[:2]) for i in range(2))
    return DecodePart(out_BNH, max_BN / LOG2E, sum_BN), pages


def _attention(
    layout: Layout,
    q_TNH: jax.Array,
    new: jax.Array | Quantised,
    pages: jax.Array | Packed,
    schedule: Schedule,
    *,
    layer: int | jax.Array,
    num_pages: int,
    scale: float,
    softcap: float | None = None,
    sinks_N: jax.Array | None = None,
    is_part: bool = False,
    out_dtype: Any,
    interpret: Any,
) -> tuple[jax.Array, Any, Any]:
    """Attends pages of any layout. new: [T, 2K, H], keys, then values; latent rows [T, 1, X].
    Returns (out, what `decode` says of softmaxes, pages).
    """
    packing = packing_of(new) if isinstance(new, Quantised) else None
    pools = PerPool(*pages) if isinstance(pages, Packed) else PerPool(pages, None)
    _check(layout, q_TNH, pools, packing, schedule)
    static = Static(
        layout=layout,
        packing=packing,
        dtype=jnp.dtype(jnp.bfloat16) if packing else pools.pages.dtype,
        page_size=schedule.page_size,
        num_pages=num_pages,
        per_row=q_TNH.shape[1] // layout.joined,
        rows=0,
        block=schedule.tiles.decode_pages,
        part=schedule.tiles.prefill_pages,
        heads=schedule.tiles.decode_heads,
        queries=schedule.tiles.prefill_queries,
        scale=scale,
        windowed=schedule.windowed,
        softcap=softcap,
        sinks=sinks_N is not None,
        streamed=schedule.records is not None,
        is_part=is_part,
        wait_by_page=interpret is True,
    )
    base = jnp.reshape(jnp.asarray(layer * num_pages, jnp.int32), (1,))
    q_TJMX = pack_queries(layout, q_TNH.astype(static.dtype))
    sinks_JM = None if sinks_N is None else sinks_N.astype(jnp.float32).reshape(layout.joined, -1)
    num_rows = min(schedule.batch, q_TNH.shape[0])
    if not isinstance(new, Quantised):
        of_step = PerPool(pack(layout, new.astype(static.dtype)[:, :, None])[:, :, 0], None)
        of_decode = PerPool(of_step.pages[:num_rows], None)
    else:
        packing = packing_of(new)
        of_step = PerPool(*pack_new(layout, packing, new))
        words = in_slots(of_step.scales[:num_rows], schedule.page_size, pools.scales.shape[2])
        numbers = of_step.pages[:num_rows].astype(jnp.int32) & (2**packing.num_bits - 1)
        of_decode = PerPool(numbers, words)
    decoded, softmaxes, pools = decode(
        q_TJMX[:num_rows],
        of_decode,
        sinks_JM,
        pools,
        schedule,
        base,
        static=static,
        interpret=interpret,
    )
    out = unpack_outputs(layout, decoded.astype(out_dtype))
    if schedule.write is not None:
        pools = write(of_step, pools, schedule.write, base, packing=packing, interpret=interpret)
        static = replace(static, block=schedule.tiles.prefill_block)
        filled = prefill(
            q_TJMX,
            sinks_JM,
            pools,
            schedule,
            base,
            static=static,
            out_dtype=out_dtype,
            interpret=interpret,
        )
        out = first_rows(out, unpack_outputs(layout, filled), schedule.num_decode)
    return out, softmaxes, pools.pages if packing is None else Packed(*pools)


def _shape(x: jax.Array | Quantised) -> tuple[int, ...]:
    return (x.values if isinstance(x, Quantised) else x).shape


def _check(
    layout: Layout,
    q_TNH: jax.Array,
    pools: PerPool,
    packing: Packing | None,
    schedule: Schedule,
) -> None:
    if packing is None:
        expected: tuple[tuple[int, ...], ...] = ((layout.rows, schedule.page_size, layout.width),)
    else:
        expected = packing.page_shapes(layout, schedule.page_size)
    if (got := tuple(pool.shape[1:] for pool in pools.each())) != expected:
        raise ValueError(f"pages: expected [L*P, ...] with ... = {expected}, got {got}")
    if q_TNH.shape[1] % layout.kv_heads or q_TNH.shape[2] != layout.head_dim:
        heads = f"a multiple of {layout.kv_heads} heads of {layout.head_dim}"
        raise ValueError(f"queries: expected {heads}, got {q_TNH.shape[1:]}")
    if packing is None and (dtype := pools.pages.dtype) not in (jnp.bfloat16, jnp.float32):
        raise NotImplementedError(f"pages: expected bfloat16 or float32, got {dtype}")
    if schedule.page_size not in (sizes := page_sizes(packing)):
        raise NotImplementedError(f"page_size: expected one of {sizes}, got {schedule.page_size}")
    if schedule.records is not None and (smem_bytes := prefill_smem_bytes(schedule)) > SMEM_BYTES:
        rows = f"rows of {schedule.width} pages"
        raise NotImplementedError(
            f"{rows} take {smem_bytes} bytes of scalar memory, expected at most {SMEM_BYTES}"
        )


def page_sizes(packing: Packing | None) -> tuple[int, ...]:
    """Lists what the kernels take: packed pages are of whole tiles."""
    return tuple(size for size in PAGE_SIZES if packing is None or size % packing.tile == 0)
