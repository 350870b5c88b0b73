"""Runs every family: a model is a `ModelSpec` and a weight tree (`weights.tree`).

A layer is a mixer, where tokens meet (attention over the pages of the layer's KV group), and a
feed-forward, where each token is alone (a gated MLP): `mix` and `feed_forward` in `forward`. One
body, compiled once, runs all layers. Layers in different KV groups part only where they read and
write their pages: they pick their tables by number, and branch only between unlike stores.

How to add a layer of another kind: its family lists its tensors in `Layout.layer`, and `mix` or
`feed_forward` picks it by the tensors that `w` has, as `_project` does for qk-norm; it takes the
normed [T, D] and returns what joins the stream. Layers of several kinds in one model need a stack
for each kind in `weights.tree` and a branch on the kind, as `PagedAttention` has one.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxkv.kv.state import PagedKV, Statistics
from jaxkv.models.paged import Held, PagedAttention
from jaxkv.models.rope import rope_frequencies
from jaxkv.models.spec import ModelSpec
from jaxkv.ops.attention import BACKENDS, Attention, Batch
from jaxkv.ops.layers import (
    Matrix,
    apply_rope,
    gated_mlp,
    linear,
    linear_over,
    rms_norm,
    rope_tables,
    values,
)
from jaxkv.weights.tree import Weights, layer_weights


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
    rope = rope_tables(batch.position_T, *rope_frequencies(spec))

    def mix(h_TD: jax.Array, w: Weights, held: Held, number: jax.Array) -> tuple[jax.Array, Held]:
        q, k, v = _project(h_TD, w, rope, spec)
        out, held = attend(held, number, q, k, v, out_dtype=w["o"].dtype)
        out_TF = out.reshape(out.shape[0], -1)
        return linear_over(out_TF, w["o"], w.get("o_bias"), axis=axis), held

    def feed_forward(h_TD: jax.Array, w: Weights) -> jax.Array:
        return gated_mlp(h_TD, w, activation=spec.activation, axis=axis)

    def layer(number: jax.Array, carry: tuple[jax.Array, Held]) -> tuple[jax.Array, Held]:
        x_TD, held = carry
        w = layer_weights(weights, number)
        h_TD = rms_norm(x_TD, w["attn_norm"], eps=spec.norm_eps)
        mixed_TD, held = mix(h_TD, w, held, number)
        x_TD = x_TD + mixed_TD
        h_TD = rms_norm(x_TD, w["mlp_norm"], eps=spec.norm_eps)
        return x_TD + feed_forward(h_TD, w), held

    x_TD = _embed(weights["embed"], batch.token_T, spec, axis)
    # The pools are carried whole, with the layer's number beside them: as scan xs/ys they would be
    # copied (7.25 GiB against 0.1 MiB of temporaries for a 7 GiB pool, compiled for v5e).
    with jax.named_scope("layers"):  # by which `jaxkv check` knows the loop in a compiled program
        carry = (x_TD, attend.held(statistics))
        x_TD, held = jax.lax.fori_loop(0, spec.num_layers, layer, carry)
    return attend.state(held), x_TD, _of_all_devices(held.statistics, statistics, axis)


def head_of(weights: Weights) -> Weights:
    """Returns what `logits` takes of the weights: the final norm, and the head or the embeddings
    that are it.
    """
    return {name: weights[name] for name in ("norm", "head" if "head" in weights else "embed")}


def logits(
    weights: Weights, x_TD: jax.Array, *, spec: ModelSpec, axis: str | None = None
) -> jax.Array:
    """Applies the final norm and the head: [T, D] -> [T, V] float32."""
    x_TD = rms_norm(x_TD, values(weights["norm"]), eps=spec.norm_eps)
    head_VD = weights["head" if "head" in weights else "embed"]
    part_TV = linear(x_TD, Matrix(head_VD))
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


def _project(
    x_TD: jax.Array, w: Weights, rope: tuple[jax.Array, jax.Array], spec: ModelSpec
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes rotated queries [T, N, H] and keys [T, K, H], and values [T, K, H]; with qk-norm
    where the weights have it.

    Keys and queries are suited to being quantised where the weights say how (`programs.fit_keys`).
    """

    def heads(name: str) -> jax.Array:
        y = linear(x_TD, w[name], w.get(f"{name}_bias"))
        return y.reshape(y.shape[0], -1, spec.head_dim)

    q, k, v = heads("q"), heads("k"), heads("v")
    if "q_norm" in w:
        q = rms_norm(q, w["q_norm"], eps=spec.norm_eps)
        k = rms_norm(k, w["k_norm"], eps=spec.norm_eps)
    q, k = apply_rope(q, *rope), apply_rope(k, *rope)
    if "k_affine" in w:
        mean_1KH, factor_1KH = jnp.moveaxis(w["k_affine"].reshape(1, -1, 2, spec.head_dim), 2, 0)
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
