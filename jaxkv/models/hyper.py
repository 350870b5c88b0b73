"""Gives tokens several streams, each block a weighed sum of them (hyper-connections).

The weights, which a small matrix reads out of all N streams [N, T, D] of a token, are three: how
much of each stream comes into the block, how much of what it gives joins each, and how streams go
on: a matrix whose rows and columns add up to 1, so that depth makes them neither grow nor fade.
Sources: arXiv 2409.19606; the matrix arXiv 2512.24880, section 4.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxkv.models.spec import HyperSpec, ModelSpec
from jaxkv.ops.layers import linear_float32, rms_norm, total_over
from jaxkv.weights.tree import Weights

Leave = Callable[[jax.Array], jax.Array]
"""Takes what a block gives, [T, D], to the streams behind it, [N, T, D]."""


def spread(x: jax.Array, spec: ModelSpec) -> jax.Array:
    """Returns the streams [N, T, D] of embeddings, the same x in a model that has none."""
    asked = spec.scales.hyper
    return x if asked is None else jnp.broadcast_to(x[None], (asked.num_streams, *x.shape))


def joined(x: jax.Array, spec: ModelSpec) -> jax.Array:
    """Returns the mean of streams: hidden states [T, D], which others are already."""
    return x if spec.scales.hyper is None else total_over(x, 0) / x.shape[0]


def enter(x_NTD: jax.Array, w: Weights, name: str, spec: ModelSpec) -> tuple[jax.Array, Leave]:
    """Returns what comes into a block, [T, D], and what takes its result to the streams. name: of
    the leaves [N * (2 + N), N * D] with the matrix, of its biases and its three factors.
    """
    asked = spec.scales.hyper
    if asked is None:
        raise ValueError("expected a model with several streams, got one of one stream")
    count, num_tokens, width = x_NTD.shape
    x_TF = x_NTD.transpose(1, 0, 2).reshape(num_tokens, count * width)
    x_TF = rms_norm(x_TF, jnp.ones(count * width, jnp.float32), eps=spec.norm_eps)
    said_FT = linear_float32(x_TF, w[name]).T
    bias_F1 = w[f"{name}_bias"].astype(jnp.float32)[:, None]
    factor_3 = w[f"{name}_scale"].astype(jnp.float32)
    into_NT, out_NT, mix_MT = (
        said_FT[part] * factor_3[i] + bias_F1[part]
        for i, part in enumerate((slice(0, count), slice(count, 2 * count), slice(2 * count, None)))
    )
    into_NT = jax.nn.sigmoid(into_NT) + asked.eps
    out_NT = 2 * jax.nn.sigmoid(out_NT)
    mix_NNT = _balanced(mix_MT.reshape(count, count, num_tokens), asked)

    def leave(y_TD: jax.Array) -> jax.Array:
        kept = [total_over(mix_NNT[:, i, :, None] * x_NTD, 0) for i in range(count)]
        return jnp.stack(kept) + out_NT[..., None] * y_TD[None]

    return total_over(into_NT[..., None] * x_NTD, 0), leave


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
