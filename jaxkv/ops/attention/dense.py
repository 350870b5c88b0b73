"""Paged attention with all scores at once: the same sums as the XLA backend's, in operations that
JAX differentiates and maps. It reads pages of every backend, and writes those of XLA.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from jaxkv.kv.state import BEHIND, PageTables, Store, write
from jaxkv.ops.attention.base import (
    DISTANCES_ON_XLA,
    Attended,
    Batch,
    Place,
    Terms,
    refuse_statistics,
)
from jaxkv.ops.attention.index import Choice, Entries
from jaxkv.ops.attention.softmax import MASKED
from jaxkv.ops.attention.sweep import Scores, Window
from jaxkv.ops.attention.xla import Xla
from jaxkv.ops.layers import soft_cap
from jaxkv.pytree import pytree


@dataclass(frozen=True, slots=True)
class Dense(Xla):
    """See `base.Attention`. Cost: T scores per head for each slot of all rows' tables."""

    def attend(
        self,
        q_TNH: jax.Array,
        k_TKH: jax.Array | None,
        v_TKH: jax.Array | None,
        at: Place,
        batch: Batch,
        prepared: tuple[jax.Array, Window, Window],
        terms: Terms,
    ) -> Attended:
        dest_T, window, chunk = prepared
        store, maps, index = at.store, terms.maps, terms.index
        if isinstance(index, Entries):
            raise NotImplementedError("compressed attention runs on xla")
        if terms.distances is not None:
            raise NotImplementedError(DISTANCES_ON_XLA)
        if k_TKH is not None:
            store = write(store, k_TKH, v_TKH, dest_T=dest_T, layer=at.layer)
        if maps is not None:
            q_TNH = maps.absorb(q_TNH)
            missing = store.layout.head_dim - q_TNH.shape[2]
            q_TNH = jnp.pad(q_TNH, ((0, 0), (0, 0), (0, missing)))
        out_TNH = read(
            q_TNH,
            at._replace(store=store),
            batch,
            scale=terms.scale,
            window=window,
            chunk=chunk,
            cap=terms.cap,
            sinks_N=terms.sinks_N,
            index=index,
        )
        return Attended(out_TNH if maps is None else maps.values_of(out_TNH), store, None)


def read(
    q_TNH: jax.Array,
    at: Place,
    batch: Batch,
    *,
    scale: float,
    window: Window,
    chunk: Window = None,
    cap: float = 0.0,
    sinks_N: jax.Array | None = None,
    index: Choice | None = None,
) -> jax.Array:
    """Attends over pages that have the step's keys and values, as `xla.read` does."""
    refuse_statistics(at)
    store, tables = at.store, at.tables
    pool = 1 if index is None else index.pool
    of_pools = [_Slots.of(store, tables, at.layer, pool)]
    if store.low is not None and tables.low is not None:
        of_pools.append(_Slots.of(store.low, tables.low, at.layer, pool))
    slots = jax.tree.map(lambda *x: jnp.concatenate(x), *of_pools)
    distance_TJ = batch.position_T[:, None] - slots.position_J[None]
    seen_TJ = (batch.row_T[:, None] == slots.row_J[None]) & slots.held_J[None]
    seen_TJ &= distance_TJ >= 0
    reach = Scores(window, chunk, cap, None).reach(batch.position_T[:, None])
    if reach is not None:
        seen_TJ &= distance_TJ < reach
    seen_TKJ, heads = seen_TJ[:, None], store.layout.num_kv_heads
    if index is not None:
        if store.layout.has_index_key:
            key_JX = slots.k_JKH[:, heads, : index.key_dim]
        else:
            key_JX = slots.k_JKH[:, 0, -index.key_dim :]
        position_1T, position_1J = batch.position_T[None], slots.position_J[None]
        score = index.scores(key_JX[None], seen_TJ[None], position_1T, position_1J)
        seen_TKJ &= jnp.repeat(index.choose(score)[0], index.pool, axis=2)
    slots = replace(slots, k_JKH=slots.k_JKH[:, :heads])
    return _attend(q_TNH.astype(jnp.float32) * scale, slots, seen_TKJ, cap=cap, sinks_N=sinks_N)


@pytree
class _Slots:
    """Holds all slots of the rows' tables, one row after the other, each of whole groups of slots
    that are chosen together: keys and values [J, K, H] float32, zeros where nobody holds them, and
    the row and position of each.
    """

    k_JKH: jax.Array
    v_JKH: jax.Array
    row_J: jax.Array
    position_J: jax.Array
    held_J: jax.Array

    @classmethod
    def of(cls, store: Store, tables: PageTables, layer: int | jax.Array, together: int) -> _Slots:
        size = store.page_size
        missing = -tables.table_BW.shape[1] % (math.lcm(size, together) // size)
        table_BW, first_BW = (
            jnp.pad(x, ((0, 0), (0, missing))) for x in (tables.table_BW, tables.first_BW)
        )
        num_rows, width = table_BW.shape
        page_BW = layer * store.num_pages + table_BW
        k, v = store.layout.unpack([pool[page_BW] for pool in store.arrays])
        slot_BWS = jnp.arange(width * size, dtype=jnp.int32).reshape(1, width, size)
        held_BWS = slot_BWS < tables.len_B[:, None, None]
        held_BWS &= (first_BW != BEHIND)[..., None]
        held_J = held_BWS.reshape(-1)
        # 0 x NaN is NaN, in a gradient too.
        k, v = (jnp.where(held_J[:, None, None], x.reshape(-1, *x.shape[2:]), 0) for x in (k, v))
        position_BWS = first_BW[..., None] + slot_BWS % size
        row_J = jnp.repeat(jnp.arange(num_rows, dtype=jnp.int32), width * size)
        return cls(k, v, row_J, position_BWS.reshape(-1), held_J)


def _attend(
    q_TNH: jax.Array,
    slots: _Slots,
    seen_TKJ: jax.Array,
    *,
    cap: float,
    sinks_N: jax.Array | None,
) -> jax.Array:
    """Returns [T, N, H] float32, as wide as values are."""
    num_tokens, num_heads, head_dim = q_TNH.shape
    heads, exact = slots.k_JKH.shape[1], jax.lax.Precision.HIGHEST
    q_TKGH = q_TNH.reshape(num_tokens, heads, -1, head_dim)
    scores_TKGJ = jnp.einsum("tkgh,jkh->tkgj", q_TKGH, slots.k_JKH, precision=exact)
    scores_TKGJ = soft_cap(scores_TKGJ, cap) if cap else scores_TKGJ
    seen_TKGJ = seen_TKJ[:, :, None]
    top_TKG1 = jnp.where(seen_TKGJ, scores_TKGJ, MASKED).max(axis=-1, keepdims=True)
    sink_KG1 = None if sinks_N is None else sinks_N.astype(jnp.float32).reshape(heads, -1, 1)
    if sink_KG1 is not None:
        top_TKG1 = jnp.maximum(top_TKG1, sink_KG1[None])
    top_TKG1 = jax.lax.stop_gradient(top_TKG1)
    weight_TKGJ = jnp.exp(jnp.where(seen_TKGJ, scores_TKGJ - top_TKG1, MASKED))
    sum_TKG1 = weight_TKGJ.sum(axis=-1, keepdims=True)
    if sink_KG1 is not None:
        sum_TKG1 += jnp.exp(sink_KG1[None] - top_TKG1)
    # Padding sees nothing: it gets zeros instead of NaN.
    weight_TKGJ /= jnp.where(sum_TKG1 > 0, sum_TKG1, 1)
    out_TKGH = jnp.einsum("tkgj,jkh->tkgh", weight_TKGJ, slots.v_JKH, precision=exact)
    return out_TKGH.reshape(num_tokens, num_heads, -1)
