"""Attends on a CPU by machine code of our own (`kernels_pallas.cpu.attention`), where `ops.native`
has it made: it reads pages where they lie.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.kv.codecs import PlainCodec, ScaledCodec
from jaxkv.kv.layout import LaneRowsLayout
from jaxkv.ops import native
from jaxkv.ops.attention.base import Batch, Place
from jaxkv.ops.attention.softmax import MASKED
from jaxkv.ops.attention.sweep import Scores
from kernels_pallas.cpu import attention as kernel
from kernels_pallas.cpu import chunk, queries


def handler_for(at: Place) -> str | None:
    """Names what attends to these pages; None where XLA has to: of codecs that rotate or pack,
    pages in two codecs or chosen ones, latent rows, where attention is observed, of a TPU's pages,
    and of sizes that are no whole vectors.
    """
    store, codec = at.store, at.store.codec
    if isinstance(codec, PlainCodec):
        stored = codec.dtype
    elif isinstance(codec, ScaledCodec) and codec.kind == "int8":
        stored = codec.kind
    else:
        return None
    has_more = store.low is not None or store.num_read is not None or at.statistics is not None
    has_more = has_more or isinstance(store.layout, LaneRowsLayout) or store.layout.has_index_key
    size, head_dim = store.page_size, store.layout.head_dim
    if has_more or store.layout.latent_dim is not None or native.unused_because() is not None:
        return None
    lanes = 16 if native.is_wide() else 8
    fits = size <= queries.BLOCK and size % lanes == head_dim % (queries.TILE_VECTORS * lanes) == 0
    if kernel.has_chunks(stored, lanes):
        fits = fits and head_dim <= chunk.LONGEST
    return kernel.HANDLERS[lanes][stored] if fits else None


CHUNK_QUERIES = 48
"""Queries of a KV head, at most, that a thread attends at a time where rows have several tokens."""


def attend(
    q_TNH: jax.Array,
    at: Place,
    batch: Batch,
    *,
    handler: str,
    asked: Scores,
) -> tuple[jax.Array, None]:
    """Attends all tokens of a step, [T, N, H] float32; zeros for padding and for a row that rests.
    Observes nothing.

    The bits of a token depend on nothing but its query, what its row's table has and, where pages
    are bfloat16, whether it is a decode row.
    """
    store, tables = at.store, at.tables
    group = q_TNH.shape[1] // store.layout.num_kv_heads
    num_tokens, num_heads, _ = q_TNH.shape
    row_T, position_T = batch.row_T, batch.position_T
    of_row = partial(jnp.take, indices=row_T, mode="fill", fill_value=0)
    offset_T = jnp.arange(num_tokens, dtype=jnp.int32) - of_row(batch.start_B)
    stop_T = of_row(tables.len_B) - of_row(batch.count_B) + offset_T + 1
    reach = asked.reach(position_T)
    reach_T = jnp.broadcast_to(np.iinfo(np.int32).max if reach is None else reach, row_T.shape)
    row_T = jnp.where(of_row(batch.count_B) > 0, row_T, -1)
    # What decodes in chunks is to have the bits that it has in decode rows.
    is_chunk_T = (row_T >= batch.num_decode) & (batch.chunk_len is None)
    token_T5 = jnp.stack([row_T, position_T, reach_T, stop_T, is_chunk_T], axis=1)
    if asked.sinks_KG is None:
        sinks_N = jnp.full(num_heads, MASKED, jnp.float32)
    else:
        sinks_N = asked.sinks_KG.reshape(-1).astype(jnp.float32)
    result = jax.ShapeDtypeStruct(q_TNH.shape, jnp.float32)
    out_TNH = jax.ffi.ffi_call(handler, result, vmap_method="sequential")(
        q_TNH,
        store.pages,
        token_T5.astype(jnp.int32),
        jnp.asarray(tables.table_BW, jnp.int32),
        jnp.asarray(tables.first_BW, jnp.int32),
        sinks_N,
        jnp.float32(asked.cap),
        jnp.asarray(at.layer * store.num_pages, jnp.int32),
        jnp.int32(1 if batch.decode_only else max(1, CHUNK_QUERIES // group)),
    )
    return out_TNH, None


def decode(
    q_BNH: jax.Array,
    at: Place,
    position_B: jax.Array,
    live_B: jax.Array,
    *,
    handler: str,
    asked: Scores,
) -> tuple[jax.Array, None]:
    """Attends one query per row, as `attend` does."""
    row_B = jnp.arange(len(live_B), dtype=jnp.int32)
    count_B = live_B.astype(jnp.int32)
    rows, none = jnp.int32(len(live_B)), jnp.zeros_like(row_B)
    batch = Batch(none, position_B, row_B, row_B, count_B, rows, rows, decode_only=True)
    return attend(q_BNH, at, batch, handler=handler, asked=asked)
