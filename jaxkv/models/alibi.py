"""Lets attention scores fall with distance in place of any embedding of positions. Source: ALiBi,
arXiv 2108.12409.

The score of a query at i and a key at j loses slope * (i - j). Of that slope * i is the same for
all keys of a query, which a softmax does not see. What is left, slope * j, is a product of a number
of the query and one of the key, so it is there once both have it as one more dimension: no kernel
needs to know. The position takes two, since bfloat16 counts to 256 only.
"""

from __future__ import annotations

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.axes import MeshAxes
from jaxkv.models.spec import ModelSpec

NUM_DIMS = 2
"""Dimensions that a head's queries and keys have more."""

BASE = 256
MAX_LEN = BASE**2
"""Positions that two numbers hold exactly in bfloat16."""

MAX_HEADS = 2**14
"""Bounds the slopes, which a model has one by one."""


def slopes(num_heads: int, *, steepest: float = 8.0) -> tuple[float, ...]:
    """Returns the slope of each head: 2**(-steepest * n / N) for head n of 1 to N; where N is no
    power of two those of the power below, and every other one of twice as many heads.
    """

    def of(count: int) -> list[float]:
        return [2.0 ** (-steepest * (n + 1) / count) for n in range(count)]

    below = 2 ** int(math.log2(num_heads))
    return tuple(of(below) + of(2 * below)[::2][: num_heads - below])


def with_slopes(spec: ModelSpec, slopes_N: tuple[float, ...]) -> ModelSpec:
    """Returns a model whose scores fall with distance, and whose keys are larger for that."""
    groups = tuple(replace(one, head_dim=one.head_dim + NUM_DIMS) for one in spec.groups)
    return replace(spec, attention=replace(spec.attention, slopes=slopes_N), groups=groups)


def with_positions(
    q_TNH: jax.Array,
    k_TKH: jax.Array,
    position_T: jax.Array,
    slopes_N: np.ndarray,
    *,
    scale: float,
    axis: MeshAxes | None,
) -> tuple[jax.Array, jax.Array]:
    """Returns queries and keys with NUM_DIMS dimensions more. scale: of the scores. axis: the mesh
    axis over which heads are divided; slopes_N are those of all.
    """
    num_heads = q_TNH.shape[1]
    slope_N = jnp.asarray(slopes_N, jnp.float32) / scale
    if axis is not None:
        first = jax.lax.axis_index(axis) * num_heads
        slope_N = jax.lax.dynamic_slice_in_dim(slope_N, first, num_heads)
    of_query_N2 = jnp.stack([BASE * slope_N, slope_N], axis=1)
    of_key_T2 = jnp.stack([position_T // BASE, position_T % BASE], axis=1).astype(k_TKH.dtype)
    return _joined(q_TNH, of_query_N2[None]), _joined(k_TKH, of_key_T2[:, None])


def _joined(x: jax.Array, more: jax.Array) -> jax.Array:
    size = (*x.shape[:2], NUM_DIMS)
    return jnp.concatenate([x, jnp.broadcast_to(more.astype(x.dtype), size)], axis=2)
