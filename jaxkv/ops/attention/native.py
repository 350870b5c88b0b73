"""Attends decode rows on a CPU by machine code of our own (`kernels_pallas.cpu.attention`), where
`ops.native` has it made: it reads pages where they lie.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.kv.codecs import PlainCodec, ScaledCodec
from jaxkv.ops import native
from jaxkv.ops.attention.base import Place
from jaxkv.ops.attention.softmax import MASKED
from jaxkv.ops.attention.sweep import Scores
from kernels_pallas.cpu import attention as kernel


def handler_for(at: Place) -> str | None:
    """Names what attends to these pages; None where XLA has to: of codecs that rotate or pack,
    pages in two codecs or chosen ones, latent rows, where attention is observed, and of sizes that
    are no multiple of 8.
    """
    store, codec = at.store, at.store.codec
    if isinstance(codec, PlainCodec):
        stored = codec.dtype
    elif isinstance(codec, ScaledCodec) and codec.kind == "int8":
        stored = codec.kind
    else:
        return None
    has_more = store.low is not None or store.num_read is not None or at.statistics is not None
    size, head_dim = store.page_size, store.layout.head_dim
    fits = size <= kernel.BLOCK and size % kernel.MULTIPLE == head_dim % kernel.MULTIPLE == 0
    if has_more or store.layout.latent_dim is not None or not fits or native.unused_because():
        return None
    return kernel.HANDLERS[stored]


def decode(
    q_BNH: jax.Array,
    at: Place,
    position_B: jax.Array,
    live_B: jax.Array,
    *,
    handler: str,
    asked: Scores,
) -> tuple[jax.Array, None]:
    """Attends one query per row, [B, N, H] float32; zeros where a row rests. Observes nothing.

    The bits of a row depend on nothing but its query and what its table has.
    """
    store, tables = at.store, at.tables
    num_heads = q_BNH.shape[1]
    reach = asked.reach(position_B)
    reach_B = jnp.broadcast_to(np.iinfo(np.int32).max if reach is None else reach, live_B.shape)
    len_B = jnp.where(live_B, tables.len_B, 0)
    rows_B3 = jnp.stack([len_B, position_B, reach_B], axis=1)
    if asked.sinks_KG is None:
        sinks_N = jnp.full(num_heads, MASKED, jnp.float32)
    else:
        sinks_N = asked.sinks_KG.reshape(-1).astype(jnp.float32)
    base = jnp.asarray(at.layer * store.num_pages, jnp.int32)
    result = jax.ShapeDtypeStruct(q_BNH.shape, jnp.float32)
    attend = jax.ffi.ffi_call(handler, result, vmap_method="sequential")
    out_BNH = attend(
        q_BNH,
        store.pages,
        jnp.asarray(tables.table_BW, jnp.int32),
        jnp.asarray(tables.first_BW, jnp.int32),
        rows_B3.astype(jnp.int32),
        sinks_N,
        jnp.float32(asked.cap),
        base,
    )
    return out_BNH, None
