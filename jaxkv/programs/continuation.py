"""The step of a continuation: a pure function that consumes nothing, for callers' own programs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp

from jaxkv.kv.state import PagedKV, Store
from jaxkv.models import decoder
from jaxkv.models.spec import ModelSpec
from jaxkv.ops.attention import Batch
from jaxkv.ops.attention.dense import Dense
from jaxkv.weights.tree import Weights

embed = jax.jit(decoder.embed, static_argnames=("spec", "axis"))


@partial(jax.jit, static_argnames=("spec",))
def extend(
    weights: Weights,
    prefix: tuple[Store, ...],
    own: PagedKV,
    x_TD: jax.Array,
    *,
    spec: ModelSpec,
) -> tuple[PagedKV, jax.Array]:
    """Runs the embeddings of the next T tokens of one row, whose first tokens are in `prefix`.

    own: the row's tokens behind those, one page each layer, whose table says in `low` which pages
    of `prefix` the row has. Reads `prefix`, and writes a new `own`.
    Returns that and the logits after each token, [T, V] float32; NaN where `own` is too small.
    """
    (tables,), num_tokens = own.rows, x_TD.shape[0]
    stores = (replace(one, low=low) for one, low in zip(own.stores, prefix, strict=True))
    none_T, one_B = jnp.zeros(num_tokens, jnp.int32), jnp.zeros(1, jnp.int32)
    start = tables.first_BW[0, 0] + tables.len_B[0]
    batch = Batch(
        token_T=none_T,
        position_T=start + jnp.arange(num_tokens, dtype=jnp.int32),
        row_T=none_T,
        start_B=one_B,
        count_B=one_B + num_tokens,
        num_decode=jnp.int32(0),
        num_rows=jnp.int32(1),
    )
    kv, x_TD, *_ = decoder.forward(
        weights,
        PagedKV(tuple(stores), own.rows),
        batch,
        spec=spec,
        backend=Dense(),
        embedded_TD=x_TD.astype(jnp.float32),
    )
    logits_TV = decoder.logits(weights, x_TD, spec=spec)
    has_room = kv.rows[0].len_B[0] <= own.stores[0].page_size
    own = PagedKV(tuple(replace(one, low=None) for one in kv.stores), kv.rows)
    return own, jnp.where(has_room, logits_TV, jnp.nan)
