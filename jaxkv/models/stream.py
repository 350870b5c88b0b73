"""Norms what goes into a layer's blocks, and adds what they give to the stream, in the ways that
families have of it: a factor, a rate, gates, a map beside the block.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxkv.axes import MeshAxes
from jaxkv.models.spec import ModelSpec, OwnNorm
from jaxkv.ops.layers import ACTIVATIONS, layer_norm, linear, rms_norm, shortened
from jaxkv.ops.matrices import values
from jaxkv.weights.tree import Weights

LEAST_KEPT = 1e-3
"""What counts of the stream at least where gates weigh it, squared."""


def normed(
    x: jax.Array, w: Weights, name: str, spec: ModelSpec, *, axis: MeshAxes | None = None
) -> jax.Array:
    """Applies the norm of that name over the last axis; the same x where the model has none. What
    the norm gives is gated by a map of low rank of it where the weights have one (A.X-K2).
    """
    own = dict(spec.scales.norms).get(name, OwnNorm())
    if name in w:
        scale = values(w[name]).astype(jnp.float32)
        scale = scale + 1 if spec.norm.endswith("_one") and not own.is_plain else scale
        bias = values(w[f"{name}_bias"]) if f"{name}_bias" in w else None
    elif name in spec.unit_norms:
        scale, bias = jnp.ones(x.shape[-1], jnp.float32), None
    else:
        return x
    if own.weighs_first or own.longest is not None:
        x = x * jnp.expand_dims(scale, tuple(range(x.ndim - scale.ndim)))
        scale = jnp.ones_like(scale)
    if own.longest is not None:
        return shortened(x, own.longest)
    eps = spec.norm_eps if own.eps is None else own.eps
    if spec.norm == "length":
        width = x.shape[-1] * (1 if axis is None else jax.lax.axis_size(axis))
        scale, eps = scale * width**-0.5, eps / width
    if spec.norm.startswith("layer"):
        y = layer_norm(x, scale, bias, eps=eps)
    else:
        y = rms_norm(x, scale, eps=eps, axis=axis)
    if f"{name}_down" not in w:
        return y
    low = jax.nn.silu(linear(y, w[f"{name}_down"]))
    return y * jax.nn.sigmoid(linear(low, w[f"{name}_up"]))


def scaled(x: jax.Array, factor: float) -> jax.Array:
    """Multiplies by a factor that is mostly 1."""
    return x if factor == 1.0 else x * factor


def moved(x: jax.Array, w: Weights, name: str) -> jax.Array:
    """Adds a vector and multiplies with one where the weights have them."""
    if f"{name}_gain" not in w:
        return x
    shift_D, gain_D = (values(w[f"{name}_{kind}"]) for kind in ("shift", "gain"))
    return (x + shift_D.astype(jnp.float32)[None]) * gain_D.astype(jnp.float32)[None]


def joined(x_TD: jax.Array, out_TD: jax.Array, w: Weights, name: str, spec: ModelSpec) -> jax.Array:
    """Adds to the stream what a block gives. A layer may weigh the stream (Doge), or have gates
    that weigh both, so that a sum of parts that are independent stays as large. Source: Muse Spark,
    as transformers has it.
    """
    if f"{name}_kept" in w:
        return x_TD * values(w[f"{name}_kept"]).astype(jnp.float32)[None] + out_TD
    if f"{name}_join" not in w:
        return x_TD + out_TD
    gate_D = values(w[f"{name}_join"]).astype(jnp.float32) / spec.scales.join_temperature
    part_D = jax.nn.sigmoid(gate_D)
    kept_D = jnp.sqrt(jnp.maximum(jax.nn.sigmoid(-gate_D) * (1 + part_D), LEAST_KEPT))
    return kept_D[None] * x_TD + part_D[None] * out_TD


def towards(out_TD: jax.Array, h_TD: jax.Array, w: Weights, name: str) -> jax.Array:
    """Returns a part of the way from a block's input to its output, by a rate for each number."""
    if name not in w:
        return out_TD
    return jnp.abs(w[name].astype(jnp.float32))[None] * (out_TD - h_TD)


def weighed(
    h_TD: jax.Array, out_TD: jax.Array, factors: tuple[float, float]
) -> tuple[jax.Array, jax.Array]:
    return scaled(h_TD, factors[0]), scaled(out_TD, factors[1])


def laurel(h_TD: jax.Array, w: Weights, spec: ModelSpec) -> jax.Array:
    """Computes what joins the stream of a block's input beside the block: it and a map of low rank
    of it. Source: LAuReL, arXiv 2411.07501, section 2.
    """
    low_TX = linear(h_TD, w["laurel_down"])
    return h_TD + normed(linear(low_TX, w["laurel_up"]), w, "laurel_norm", spec)


def of_layer(x_TD: jax.Array, own_TP: jax.Array, w: Weights, spec: ModelSpec) -> jax.Array:
    """Computes what joins the stream of a layer's own inputs, which the stream gates."""
    gate_TP = ACTIVATIONS[spec.activation](linear(x_TD, w["own_gate"]))
    return normed(linear(gate_TP * own_TP, w["own_out"]), w, "own_out_norm", spec)


def to_others(x_ATD: jax.Array, own_TP: jax.Array | None, w: Weights, spec: ModelSpec) -> jax.Array:
    """Adds a layer's own inputs, which the first stream gates, to the streams behind it."""
    if own_TP is None:
        return x_ATD
    x_TD = x_ATD[0] * w["altup_scale"][None] if "altup_scale" in w else x_ATD[0]
    return x_ATD.at[1:].add(of_layer(x_TD, own_TP, w, spec)[None])
