"""Runs every family: a model is a `ModelSpec` and a weight tree (`weights.tree`).

A layer is a mixer, where tokens meet (attention over the pages of the layer's KV group), and a
feed-forward, where each token is alone (an MLP): `mix` and `feed_forward` in `forward`. One
body, compiled once, runs all layers. Layers in different KV groups part only where they read and
write their pages: they pick their tables by number, and branch only between unlike stores.

How to add a layer of another kind: its family lists its tensors as one more of `Layout.layers`, and
`mix` or the MLP picks what it does by the tensors that `w` has, as `_project` does for qk-norm; it
takes the normed [T, D] and returns what joins the stream. Each kind has a stack of weights and a
body of its own, between which the loop branches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.kv.state import PagedKV, Statistics
from jaxkv.models.paged import Held, PagedAttention
from jaxkv.models.rope import Ropes
from jaxkv.models.spec import ModelSpec, QueryTemperature
from jaxkv.ops.attention import BACKENDS, Attention, Batch
from jaxkv.ops.layers import (
    ACTIVATIONS,
    Matrix,
    Rotation,
    apply_rope,
    layer_norm,
    linear,
    linear_over,
    mlp,
    rms_norm,
    soft_cap,
    values,
)
from jaxkv.weights.tree import Weights, layer_weights

Carry = tuple[jax.Array, Held]
"""The stream [T, D] and what layers change, from layer to layer."""

Mixed = tuple[jax.Array, Held]


def forward(
    weights: Weights,
    kv: PagedKV,
    batch: Batch,
    statistics: Statistics | None = None,
    *,
    spec: ModelSpec,
    backend: str | Attention,
    axis: str | None = None,
) -> tuple[PagedKV, jax.Array, Statistics | None]:
    """Runs the packed tokens through all layers and stores their keys and values.

    `axis`: the mesh axis over which weights and pages are divided (`placement.Placement`), here and
    in `logits`.
    Returns the new state (lengths grown by this step's tokens), the hidden states [T, D] float32
    before the final norm, and the statistics with those of this step added. Cost: every array but
    the pages is of size T.
    """
    attention = BACKENDS[backend] if isinstance(backend, str) else backend
    num_devices = 1 if axis is None else jax.lax.axis_size(axis)
    attend = PagedAttention(attention, kv, batch, spec, num_devices)
    ropes = Ropes(spec, batch.position_T, _contexts(kv, batch))
    warmth_T = _query_factor(spec.attention.temperature, batch.position_T)

    def layer_of(kind: int) -> Callable[[jax.Array, Carry], Carry]:
        layers = spec.layers_of(kind)
        groups = sorted({spec.group_of(layer)[0] for layer in layers})
        head_dim, rotation_of = spec.groups[groups[0]].head_dim, ropes.of(layers)
        index_L = np.zeros(spec.num_layers, np.int32)
        index_L[list(layers)] = range(len(layers))

        def mix(h_TD: jax.Array, w: Weights, held: Held, number: jax.Array) -> Mixed:
            q, k, v = _project(h_TD, w, rotation_of(number), spec, head_dim, axis)
            if warmth_T is not None:
                q = q * warmth_T[:, None, None]
            more: Any = {"sinks_N": w.get("sinks"), "out_dtype": w["o"].dtype}
            out_TNH, held = attend(held, number, q, k, v, groups=groups, **more)
            out_TF = out_TNH.reshape(q.shape[0], -1)
            return linear_over(out_TF, w["o"], w.get("o_bias"), axis=axis), held

        def layer(number: jax.Array, carry: Carry) -> Carry:
            x_TD, held = carry
            index = number if spec.num_kinds == 1 else jnp.asarray(index_L)[number]
            w = layer_weights(weights, index, kind)
            h_TD = _normed(x_TD, w, "attn_norm", spec)
            mixed_TD, held = mix(h_TD, w, held, number)
            mixed_TD = _scaled(_normed(mixed_TD, w, "post_attn_norm", spec), spec.residual_scale)
            if spec.is_parallel:
                # Some have one norm for both.
                own = "mlp_norm" in w or "mlp_norm" in spec.unit_norms
                h_TD = _normed(x_TD, w, "mlp_norm", spec) if own else h_TD
                x_TD = x_TD + mixed_TD
            else:
                x_TD = x_TD + mixed_TD
                h_TD = _normed(x_TD, w, "mlp_norm", spec)
            out_TD = mlp(h_TD, w, activation=spec.activation, axis=axis)
            out_TD = _normed(out_TD, w, "post_mlp_norm", spec)
            x_TD = x_TD + _scaled(out_TD, spec.residual_scale)
            if own_LTP is not None:
                x_TD = x_TD + _of_layer(x_TD, own_LTP[number], w, spec)
            return x_TD * w["scalar"][None] if "scalar" in w else x_TD, held

        return layer

    layers = [layer_of(kind) for kind in range(spec.num_kinds)]
    kind_L = np.array(spec.layer_kinds or (0,) * spec.num_layers, np.int32)

    def step(number: jax.Array, carry: Carry) -> Carry:
        if len(layers) == 1:
            return layers[0](number, carry)
        return jax.lax.switch(jnp.asarray(kind_L)[number], layers, number, carry)

    x_TD = _scaled(_embed(weights["embed"], batch.token_T, spec, axis), spec.embed_scale)
    if "positions" in weights:
        position_T = jnp.asarray(batch.position_T)
        x_TD += values(weights["positions"].at[position_T].get(mode="clip")).astype(jnp.float32)
    x_TD = _normed(x_TD, weights, "embed_norm", spec)
    own_LTP = _per_layer(weights, batch.token_T, x_TD, spec) if spec.per_layer_width else None
    # The pools are carried whole, with the layer's number beside them: as scan xs/ys they would be
    # copied (7.25 GiB against 0.1 MiB of temporaries for a 7 GiB pool, compiled for v5e).
    with jax.named_scope("layers"):  # by which `jaxkv check` knows the loop in a compiled program
        carry = (x_TD, attend.held(statistics))
        x_TD, held = jax.lax.fori_loop(0, spec.num_layers, step, carry)
    return attend.state(held), x_TD, _of_all_devices(held.statistics, statistics, axis)


def _per_layer(weights: Weights, token_T: jax.Array, x_TD: jax.Array, spec: ModelSpec) -> jax.Array:
    """Computes what each layer gets of the tokens beside the stream, [L, T, P]: half of it looked
    up, half projected from their embeddings. Source: Gemma 3n's and Gemma 4's reference code.
    """
    shape = (x_TD.shape[0], spec.num_layers, spec.per_layer_width)
    found = values(weights["own_embed"].at[token_T].get(mode="clip")).astype(jnp.float32)
    projected = linear(x_TD, Matrix(weights["own_proj"])).reshape(shape) * spec.hidden_size**-0.5
    projected = _normed(projected, weights, "own_norm", spec)
    both_TLP = (projected + found.reshape(shape) * spec.per_layer_width**0.5) * 2**-0.5
    return both_TLP.transpose(1, 0, 2)


def _of_layer(x_TD: jax.Array, own_TP: jax.Array, w: Weights, spec: ModelSpec) -> jax.Array:
    """Computes what joins the stream of a layer's own inputs, which the stream gates."""
    gate_TP = ACTIVATIONS[spec.activation](linear(x_TD, w["own_gate"]))
    return _normed(linear(gate_TP * own_TP, w["own_out"]), w, "own_out_norm", spec)


def head_of(weights: Weights) -> Weights:
    """Returns what `logits` takes of the weights: the final norm, and the head or the embeddings
    that are it.
    """
    names = ("norm", "norm_bias", "head" if "head" in weights else "embed", "head_bias")
    return {name: weights[name] for name in names if name in weights}


def logits(
    weights: Weights, x_TD: jax.Array, *, spec: ModelSpec, axis: str | None = None
) -> jax.Array:
    """Applies the final norm and the head: [T, D] -> [T, V] float32."""
    x_TD = _normed(x_TD, weights, "norm", spec)
    head_VD = weights["head" if "head" in weights else "embed"]
    bias_V = values(weights["head_bias"]) if "head_bias" in weights else None
    part_TV = _scaled(linear(x_TD, Matrix(head_VD), bias_V), spec.logit_scale)
    if spec.logit_cap:
        part_TV = soft_cap(part_TV, spec.logit_cap)
    if axis is None or part_TV.shape[1] == spec.vocab_size:
        return part_TV
    return jax.lax.all_gather(part_TV, axis, axis=1, tiled=True)


def _embed(embed_VD: jax.Array, token_T: jax.Array, spec: ModelSpec, axis: str | None) -> jax.Array:
    """Looks up the tokens' embeddings [T, D] float32, of which a device may have some rows."""
    num_rows = embed_VD.shape[0]
    if axis is None or num_rows == spec.vocab_size:
        return values(embed_VD.at[token_T].get(mode="clip")).astype(jnp.float32)
    local_T = token_T - jax.lax.axis_index(axis) * num_rows
    x_TD = values(embed_VD.at[local_T].get(mode="clip")).astype(jnp.float32)
    return jax.lax.psum(jnp.where(((local_T >= 0) & (local_T < num_rows))[:, None], x_TD, 0), axis)


def _scaled(x: jax.Array, factor: float) -> jax.Array:
    return x if factor == 1.0 else x * factor


def _normed(
    x: jax.Array, w: Weights, name: str, spec: ModelSpec, *, axis: str | None = None
) -> jax.Array:
    """Applies the norm of that name over the last axis; the same x where the model has none."""
    if name in w:
        scale = values(w[name]).astype(jnp.float32)
        bias = values(w[f"{name}_bias"]) if f"{name}_bias" in w else None
    elif name in spec.unit_norms:
        scale, bias = jnp.ones(x.shape[-1], jnp.float32), None
    else:
        return x
    if spec.norm.endswith("_one"):
        scale = scale + 1
    if spec.norm.startswith("layer"):
        return layer_norm(x, scale, bias, eps=spec.norm_eps)
    return rms_norm(x, scale, eps=spec.norm_eps, axis=axis)


def _contexts(kv: PagedKV, batch: Batch) -> jax.Array | None:
    """Returns how long each token's sequence may get, [T]; None where nothing depends on it."""
    context_B = kv.rows[0].context_B
    return None if context_B is None else jnp.asarray(context_B).at[batch.row_T].get(mode="clip")


def _query_factor(temperature: QueryTemperature | None, position_T: jax.Array) -> jax.Array | None:
    """Returns the factor of each token's queries, [T]; None where there is none."""
    if temperature is None:
        return None
    period_T = jnp.floor((position_T + temperature.offset).astype(jnp.float32) / temperature.period)
    return 1 + temperature.beta * jnp.log1p(period_T)


def _project(
    x_TD: jax.Array,
    w: Weights,
    rope: Rotation | None,
    spec: ModelSpec,
    head_dim: int,
    axis: str | None,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """Computes rotated queries [T, N, H] and keys [T, K, H], and values [T, K, H], which are what
    keys are made of where the weights have none; without keys and values where they have neither.
    With qk-norm where the weights have it.

    Keys and queries are suited to being quantised where the weights say how (`programs.fit_keys`).
    """
    attention = spec.attention

    def project(name: str) -> jax.Array:
        y = linear(x_TD, w[name], w.get(f"{name}_bias"))
        return jnp.clip(y, -attention.clip, attention.clip) if attention.clip else y

    def heads(y: jax.Array, name: str) -> jax.Array:
        if attention.qk_norm == "whole":
            y = _normed(y, w, f"{name}_norm", spec, axis=axis)
        return y.reshape(y.shape[0], -1, head_dim)

    def normed(x: jax.Array, name: str) -> jax.Array:
        if attention.qk_norm == "whole":
            return x
        own = w
        if attention.qk_norm == "heads" and name in w:
            own = {name: w[name].reshape(-1, head_dim)}
        return _normed(x, own, name, spec)

    def rotated(y: jax.Array, name: str) -> jax.Array:
        x = heads(y, name)
        if not attention.norm_after_rope:
            x = normed(x, f"{name}_norm")
        if rope is not None:
            x = apply_rope(x, rope)
        return normed(x, f"{name}_norm") if attention.norm_after_rope else x

    q = rotated(project("q"), "q")
    if "k" not in w:
        return q, None, None
    key = project("k")
    value = project("v") if "v" in w else key
    k, v = rotated(key, "k"), value.reshape(value.shape[0], -1, head_dim)
    if "v_norm" in spec.unit_norms:
        v = _normed(v, {}, "v_norm", spec)
    if "k_affine" in w:
        mean_1KH, factor_1KH = jnp.moveaxis(w["k_affine"].reshape(1, -1, 2, head_dim), 2, 0)
        # What is stored of a key must not depend on whether the compiler rounds this product before
        # it adds it up.
        k = jax.lax.optimization_barrier((k - mean_1KH) * factor_1KH)
        q = q / jnp.repeat(factor_1KH, q.shape[1] // k.shape[1], axis=1)
    return q, k, v


def _of_all_devices(
    statistics: Statistics | None, before: Statistics | None, axis: str | None
) -> Statistics | None:
    """Adds up over devices what their own heads have added to the statistics."""
    if axis is None or statistics is None:
        return statistics
    gained = jax.tree.map(lambda x, y: jax.lax.psum(x - y, axis), statistics, before)
    return jax.tree.map(jnp.add, before, gained)
