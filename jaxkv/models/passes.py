"""Layers that run more than once: before some layers the stream meets what was kept of it before.
Each time through has keys and values of its own, and so is a layer by number; those that have the
same weights take turns with them (`Layout.numbers`).
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.axes import Array
from jaxkv.models.spec import ModelSpec
from jaxkv.ops.matrices import values
from jaxkv.weights.tree import Weights

INIT = "kept_init"
"""A leaf with what is kept at first, of every token alike; zeros without it."""


def empty(x_TD: Array, is_row_T: Array, weights: Weights, spec: ModelSpec) -> Array | None:
    """Returns what is kept before the first layer, [S, T, D]; None where nothing ever is."""
    if not (passes := spec.scales.passes):
        return None
    size = 1 + max(max(one.joins, one.keeps or 0) for one in passes)
    if INIT not in weights:
        return jnp.zeros((size, *x_TD.shape), jnp.float32)
    init_D = values(weights[INIT]).astype(jnp.float32)
    kept_TD = jnp.where(is_row_T[:, None], init_D[None], 0)
    return jnp.broadcast_to(kept_TD[None], (size, *x_TD.shape))


def begin(
    x_TD: Array, kept_STD: Array, number: Array, norm: Callable[[Array], Array], spec: ModelSpec
) -> tuple[Array, Array]:
    """Returns the stream that comes into layer `number` (int32), and what is kept. norm: that
    behind the last layer.
    """
    passes = spec.scales.passes
    nowhere, index_L = len(kept_STD), np.full(spec.num_layers, len(passes), np.int32)
    index_L[[one.layer for one in passes]] = range(len(passes))
    joins_P = jnp.array([one.joins for one in passes])
    keeps_P = jnp.array([nowhere if one.keeps is None else one.keeps for one in passes])
    is_normed_P = jnp.array([one.is_normed for one in passes])
    index = jnp.asarray(index_L)[number]

    def meet(x_TD: Array, kept_STD: Array) -> tuple[Array, Array]:
        x_TD = jnp.where(is_normed_P[index], norm(x_TD), x_TD)
        kept_STD = kept_STD.at[keeps_P[index]].set(x_TD, mode="drop")
        return x_TD + kept_STD[joins_P[index]], kept_STD

    return jax.lax.cond(index < len(passes), meet, lambda *same: same, x_TD, kept_STD)
