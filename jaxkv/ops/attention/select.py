"""Chooses which pages a decoding query reads, where it does not read all of them: those whose keys
could meet it best.

Source: Quest, arXiv 2406.10774, section 3.3. With the least and the largest value of each channel
over a page's keys no score in it is above the sum over channels of max(q min, q max). Each KV head
chooses for its own queries.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxkv.kv.state import Store
from jaxkv.ops.attention.softmax import MASKED, Rows


def select_pages(q_RKMH: jax.Array, store: Store, rows: Rows, *, layer: int | jax.Array) -> Rows:
    """`store.num_read` pages of each row and KV head: the first and the last that is held, and the
    best of the others by the larger bound of the head's M queries.

    Cost: reads two vectors per page and KV head.
    """
    if (
        store.extremes is None
        or store.num_read is None
        or rows.table_RKW.shape[2] <= store.num_read
    ):
        return rows
    page_RW = layer * store.num_pages + rows.table_RKW[:, 0]
    least_RWKH, most_RWKH = (store.extremes.at[page_RW, i].get(mode="clip") for i in (0, 1))
    exact = jax.lax.Precision.HIGHEST
    bound_RKMW = jnp.einsum("rkmh,rwkh->rkmw", jnp.maximum(q_RKMH, 0), most_RWKH, precision=exact)
    bound_RKMW += jnp.einsum("rkmh,rwkh->rkmw", jnp.minimum(q_RKMH, 0), least_RWKH, precision=exact)
    held_R1W = rows.held_RKW > 0
    index_W = jnp.arange(held_R1W.shape[2])[None, None]
    always_R1W = (index_W == 0) | (index_W == held_R1W.sum(axis=2, keepdims=True) - 1)
    bound_RKW = jnp.where(always_R1W, jnp.inf, bound_RKMW.max(axis=2))
    _, chosen_RKw = jax.lax.top_k(jnp.where(held_R1W, bound_RKW, MASKED), store.num_read)

    def of(x_RKW: jax.Array) -> jax.Array:
        return jnp.take_along_axis(jnp.broadcast_to(x_RKW, bound_RKW.shape), chosen_RKw, axis=2)

    return Rows(of(rows.table_RKW), of(rows.first_RKW), of(rows.held_RKW), None)
