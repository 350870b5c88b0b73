"""Gives tokens several streams, each block a weighed sum of them (hyper-connections).

The weights, which a small matrix reads out of all N streams [N, T, D] of a token, are three: how
much of each stream comes into the block, how much of what it gives joins each, and how streams go
on: as they are, or mixed by a matrix whose rows and columns add up to 1, so that depth makes them
neither grow nor fade.

Gated streams (`attn_hyper_down` and its like) are normed first, each by weights of its own, and
their mean is what comes into a block, each number weighed by a map of low rank of all streams.
Sources: arXiv 2409.19606; the matrix arXiv 2512.24880, section 4; gates transformers' qwen4_exp.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxkv.models.spec import HyperSpec, ModelSpec
from jaxkv.ops.layers import linear, linear_float32, rms_norm, rounded, total_over
from jaxkv.ops.matrices import AnyMatrix, Matrix, values
from jaxkv.weights.tree import Weights

JOIN = "hyper_join"
"""The leaf [N, N * D] outside the layers that says how much of each stream is in hidden states, or
what those begin with that gate them.
"""

Leave = Callable[[jax.Array], jax.Array]
"""Takes what a block gives, [T, D], to the streams behind it, [N, T, D]."""


def spread(x: jax.Array, spec: ModelSpec) -> jax.Array:
    """Returns the streams [N, T, D] of embeddings, the same x in a model that has none."""
    asked = spec.scales.hyper
    return x if asked is None else jnp.broadcast_to(x[None], (asked.num_streams, *x.shape))


def joined(x: jax.Array, weights: Weights, spec: ModelSpec) -> jax.Array:
    """Returns a weighed sum of streams, or their mean: hidden states [T, D], which others are
    already.
    """
    if (asked := spec.scales.hyper) is None:
        return x
    if f"{JOIN}_down" in weights:
        gates = {end: Matrix(weights[f"{JOIN}_{end}"]) for end in ("down", "up")}
        normed_TND = normed_by_stream(by_token(x), weights, f"{JOIN}_norm", spec)
        return _gated(normed_TND, gates["down"], gates["up"])
    if JOIN not in weights:
        return total_over(x, 0) / x.shape[0]
    said_NT = _said(x, {**weights, JOIN: Matrix(weights[JOIN])}, JOIN, spec)
    bias_N, scale_1 = (weights[f"{JOIN}_{end}"].astype(jnp.float32) for end in ("bias", "scale"))
    share_NT = jax.nn.sigmoid(rounded(said_NT * scale_1[0]) + bias_N[:, None]) + asked.eps
    return total_over(rounded(share_NT[..., None] * x), 0)


def enter(x_NTD: jax.Array, w: Weights, name: str, spec: ModelSpec) -> tuple[jax.Array, Leave]:
    """Returns what comes into a block, [T, D], and what takes its result to the streams. name: of
    the leaves [N * (2 + N), N * D] with the matrix, of its biases and its three factors; or what
    those of gated streams begin with.
    """
    asked = spec.scales.hyper
    if asked is None:
        raise ValueError("expected a model with several streams, got one of one stream")
    if f"{name}_down" in w:
        return _enter_gated(x_NTD, w, name, spec)
    count = x_NTD.shape[0]
    said_FT, factors = _said(x_NTD, w, name, spec), w[f"{name}_scale"].astype(jnp.float32)
    bias_F1 = w[f"{name}_bias"].astype(jnp.float32)[:, None]

    def part(i: int, end: int | None) -> jax.Array:
        rows = slice(i * count, end)
        return rounded(said_FT[rows] * factors[i]) + bias_F1[rows]

    into_NT = jax.nn.sigmoid(part(0, count)) + asked.eps
    out_NT = rounded(asked.most * jax.nn.sigmoid(part(1, 2 * count)))
    if asked.has_eps_on_way_out:
        out_NT = out_NT + asked.eps

    def leave(y_TD: jax.Array) -> jax.Array:
        kept_NTD = x_NTD
        if asked.num_rounds:
            mix_NNT = _balanced(part(2, None).reshape(count, count, -1), asked)
            mixed = [total_over(rounded(mix_NNT[:, i, :, None] * x_NTD), 0) for i in range(count)]
            kept_NTD = jnp.stack(mixed)
        return kept_NTD + rounded(out_NT[..., None] * y_TD[None])

    return total_over(rounded(into_NT[..., None] * x_NTD), 0), leave


def by_token(x_NTD: jax.Array) -> jax.Array:
    """Returns streams token by token, [T, N, D]."""
    return x_NTD.transpose(1, 0, 2)


def normed_by_stream(x_TND: jax.Array, w: Weights, name: str, spec: ModelSpec) -> jax.Array:
    """Norms each stream by weights of its own, which are one vector [N * D] less one."""
    scale_F = values(w[name]).astype(jnp.float32) + 1
    return rms_norm(x_TND, scale_F.reshape(1, x_TND.shape[1], -1), eps=spec.norm_eps)


def _enter_gated(
    x_NTD: jax.Array, w: Weights, name: str, spec: ModelSpec
) -> tuple[jax.Array, Leave]:
    """Enters a block as `enter` does, where streams are gated."""
    normed_TND = normed_by_stream(by_token(x_NTD), w, f"{name}_norm", spec)
    said_TN = linear_float32(normed_TND.reshape(len(normed_TND), -1), w[f"{name}_inject"])
    out_TN = jax.nn.sigmoid(said_TN / len(x_NTD))
    out_NT = 2 * jax.lax.optimization_barrier(out_TN).T  # as in `_said`

    def leave(y_TD: jax.Array) -> jax.Array:
        return x_NTD + rounded(out_NT[..., None] * y_TD[None])

    return _gated(normed_TND, w[f"{name}_down"], w[f"{name}_up"]), leave


def _gated(x_TND: jax.Array, down: AnyMatrix, up: AnyMatrix) -> jax.Array:
    """Returns the mean of streams whose numbers are weighed by gates of low rank, [T, D]."""
    num_tokens, count, _ = x_TND.shape
    low_TX = jax.nn.silu(linear(x_TND.reshape(num_tokens, -1), down) / count)
    gate_TND = jax.nn.sigmoid(linear(low_TX, up)).reshape(x_TND.shape)
    return total_over(rounded(gate_TND * x_TND), 1) / count


def _said(x_NTD: jax.Array, w: Weights, name: str, spec: ModelSpec) -> jax.Array:
    """Returns what a matrix says of all of a token's streams, [F, T]."""
    count, num_tokens, width = x_NTD.shape
    x_TF = x_NTD.transpose(1, 0, 2).reshape(num_tokens, count * width)
    x_TF = rms_norm(x_TF, jnp.ones(count * width, jnp.float32), eps=spec.norm_eps)
    # Else XLA:CPU computes some rows of what is transposed, in an order that their number decides.
    return jax.lax.optimization_barrier(linear_float32(x_TF, w[name])).T


def _balanced(said_NNT: jax.Array, asked: HyperSpec) -> jax.Array:
    """Returns for each token a matrix, from each stream to each, whose rows and columns add up to 1
    (Sinkhorn and Knopp's iteration).
    """
    share_NNT = jnp.exp(said_NNT - said_NNT.max(axis=1, keepdims=True))
    share_NNT = share_NNT / total_over(share_NNT, 1)[:, None] + asked.eps

    def by_columns(x_NNT: jax.Array) -> jax.Array:
        return x_NNT / (total_over(x_NNT, 0)[None] + asked.eps)

    def round_of(_: jax.Array, x_NNT: jax.Array) -> jax.Array:
        return by_columns(x_NNT / (total_over(x_NNT, 1)[:, None] + asked.eps))

    return jax.lax.fori_loop(1, asked.num_rounds, round_of, by_columns(share_NNT))
