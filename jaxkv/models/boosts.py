"""Adds to attention scores what each key is worth, whatever the query is: exp(gain * softplus(x)),
where x is a map of the values of all heads. Source: Doge, arXiv 2508.02124.

It is a product of a number of the query, the same for all, and one of the key, so it is there once
both have it as one more dimension: no kernel needs to know. What a key is worth takes two, since
bfloat16 has 8 bits.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxkv.axes import MeshAxes
from jaxkv.ops.layers import linear_over
from jaxkv.ops.matrices import values
from jaxkv.weights.tree import Weights

NUM_DIMS = 2
"""Dimensions that a head's queries and keys have more."""

BOOST, GAIN = "boost", "boost_gain"


def with_boosts(
    q_TNH: jax.Array,
    k_TKH: jax.Array,
    v_TKH: jax.Array,
    w: Weights,
    head_dim: int,
    axis: MeshAxes | None,
) -> tuple[jax.Array, jax.Array]:
    """Returns queries and keys with NUM_DIMS dimensions more, where scores are divided by
    the square root of `head_dim`. axis: the mesh axis over which heads are divided; what keys are
    worth is a map of the values of all.
    """
    num_tokens, num_heads = k_TKH.shape[:2]
    v_TF = v_TKH.reshape(num_tokens, -1)
    x_TK = linear_over(v_TF, w[BOOST], w.get(f"{BOOST}_bias"), axis=axis)
    gain_K = values(w[GAIN]).astype(jnp.float32)
    boost_TK = jnp.exp(gain_K[None] * jax.nn.softplus(x_TK))
    if axis is not None:
        first = jax.lax.axis_index(axis) * num_heads
        boost_TK = jax.lax.dynamic_slice_in_dim(boost_TK, first, num_heads, axis=1)
    high_TK = jax.lax.reduce_precision(boost_TK, 8, 7)
    of_key_TK2 = jnp.stack([high_TK, boost_TK - high_TK], axis=2)
    of_query_TN2 = jnp.full((*q_TNH.shape[:2], NUM_DIMS), head_dim**0.5, q_TNH.dtype)
    return (
        jnp.concatenate([q_TNH, of_query_TN2], axis=2),
        jnp.concatenate([k_TKH, of_key_TK2.astype(k_TKH.dtype)], axis=2),
    )
