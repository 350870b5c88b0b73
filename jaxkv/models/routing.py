"""Routers that see what those of the layers before them saw: each adds its own view of a token to a
part of the last one's, and makes logits of both. Source: ZAYA1, arXiv 2511.17127, section 2.
"""

from __future__ import annotations

import jax.numpy as jnp

from jaxkv.axes import Array
from jaxkv.models.spec import ModelSpec
from jaxkv.ops.layers import ACTIVATIONS, linear_float32, rms_norm
from jaxkv.weights.tree import LAYERS, Weights

VIEW = "router_view"
"""A leaf that only such layers have. The first one takes nothing of a layer before it."""


def empty(num_tokens: int, weights: Weights) -> Array | None:
    """Returns views before the first layer; None in a model whose routers keep none."""
    if VIEW not in (stack := weights[LAYERS]):
        return None
    return jnp.zeros((num_tokens, stack[VIEW].shape[1]), jnp.float32)


def views(x_TD: Array, w: Weights, before_TX: Array | None, spec: ModelSpec) -> tuple[Array, Array]:
    """Returns what this layer's router makes logits of, [T, X], and its view of tokens for that of
    the next layer.
    """
    view_TX = linear_float32(x_TD, w[VIEW]) + w[f"{VIEW}_bias"].astype(jnp.float32)[None]
    if before_TX is not None and "router_share" in w:
        view_TX += before_TX * w["router_share"].astype(jnp.float32)[None]
    y_TX = rms_norm(view_TX, w["router_view_norm"], eps=spec.norm_eps)
    for name in ("router_in", "router_out"):
        y_TX = linear_float32(y_TX, w[name]) + w[f"{name}_bias"].astype(jnp.float32)[None]
        y_TX = ACTIVATIONS["gelu"](y_TX)
    return y_TX, view_TX
