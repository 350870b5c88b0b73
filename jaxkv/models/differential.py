"""Attends with pairs of heads, and subtracts what the second gives from what the first gives.
Source: Differential Transformer, arXiv 2410.05258, section 2.1.

Both heads of a pair weigh the same values, which are as wide as both of their keys. So the two keys
of a token, side by side, are one key as wide as these values, and a query of one head has zeros
where the other head's key is: pages and kernels are those of a model with half as many KV heads of
twice the size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxkv.ops.layers import rms_norm, total

FIRST, SECOND = ("pair_q1", "pair_k1"), ("pair_q2", "pair_k2")
"""Vectors whose products say how much of the second head is taken off."""


def paired(
    q_TNH: jax.Array, k_TKH: jax.Array, v_TKH: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns queries, keys and values of pairs, which have half as many KV heads, twice as large.
    The heads of a pair are neighbours.
    """
    num_tokens, num_heads, size = q_TNH.shape
    pairs = (num_tokens, -1, 2 * size)
    first_TXH, second_TXH = q_TNH[:, ::2], q_TNH[:, 1::2]
    q_TXSH = jnp.stack(
        [
            jnp.pad(first_TXH, ((0, 0), (0, 0), (0, size))),
            jnp.pad(second_TXH, ((0, 0), (0, 0), (size, 0))),
        ],
        axis=2,
    )
    q_TNH = q_TXSH.reshape(num_tokens, num_heads, 2 * size)
    return q_TNH, k_TKH.reshape(pairs), v_TKH.reshape(pairs)


def difference(
    out_TNH: jax.Array, w: Mapping[str, Any], number: jax.Array, *, eps: float
) -> jax.Array:
    """Returns what each pair of query heads of layer `number` (int32) gives, [T, N / 2, H] float32.
    eps: of the norm of it.
    """
    start = 0.8 - 0.6 * jnp.exp(-0.3 * number.astype(jnp.float32))
    first, second = (jnp.exp(total(w[q] * w[k])) for q, k in (FIRST, SECOND))
    out_TNH = out_TNH.astype(jnp.float32)
    out_TXH = out_TNH[:, ::2] - (first - second + start) * out_TNH[:, 1::2]
    return rms_norm(out_TXH, jnp.ones(out_TXH.shape[2], jnp.float32), eps=eps) * (1 - start)
