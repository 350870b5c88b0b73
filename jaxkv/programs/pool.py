"""Takes from a step's hidden states what a pooled vector of each row is made of."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from jaxkv.axes import MeshAxes
from jaxkv.models.spec import ModelSpec
from jaxkv.models.stream import normed
from jaxkv.ops.attention import Batch
from jaxkv.placement import on_every_device
from jaxkv.programs.step import last_token
from jaxkv.weights.tree import Weights

KINDS = ("last", "mean", "cls")


@partial(jax.jit, static_argnames=("kind", "spec", "placement"))
@on_every_device
def pool(
    weights: Weights,
    hidden_TD: jax.Array,
    batch: Batch,
    *,
    kind: str,
    spec: ModelSpec,
    axis: MeshAxes | None,
) -> jax.Array:
    """Returns what this step has of each row's vector, [B, D] float32, behind the final norm: the
    state of its last token here, of its first ("cls"), or the sum of all ("mean"). Rows without
    tokens give anything.

    weights: what the final norm has of them.
    """
    if kind == "mean":
        x_TD = normed(hidden_TD, weights, "norm", spec)
        sum_BD = jnp.zeros((batch.start_B.shape[0], x_TD.shape[1]), jnp.float32)
        return sum_BD.at[batch.row_T].add(x_TD, mode="drop")
    place_B = last_token(batch) if kind == "last" else batch.start_B
    return normed(hidden_TD[place_B], weights, "norm", spec)


def norm_of(weights: Weights) -> Weights:
    """Returns what `pool` takes of the weights."""
    return {name: weights[name] for name in ("norm", "norm_bias") if name in weights}
