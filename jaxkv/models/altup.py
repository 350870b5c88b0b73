"""Gives tokens several streams, of which each layer computes on the first (alternating updates).

A layer predicts all A streams [A, T, D] as weighed sums of them and runs its blocks on the first;
each of them then follows by a share of what the prediction of the first has missed. A router reads
weights and shares out of the first stream. Behind the last layer they are one stream again, so
nothing outside the loop over layers knows of them. Source: AltUp, arXiv 2301.13310; the router and
how streams are made and joined: Gemma 3n's reference code.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxkv.models.spec import ModelSpec
from jaxkv.ops.layers import linear, rms_norm, total
from jaxkv.ops.matrices import Matrix
from jaxkv.weights.tree import Weights

ROUTER = "altup_router"
"""The leaf [A, D] of a layer that says that a model has several streams."""

SPREAD, JOIN = "altup_spread_{}", "altup_join_{}"
"""Leaves [D, D] outside the layers: what makes stream 1 and the following, and takes them back."""

LEAST = 1e-5
"""The mean square that a stream which is scaled has at least."""


def spread(x_TD: jax.Array, weights: Weights) -> jax.Array:
    """Returns the streams [A, T, D] of embeddings, the same [T, D] in a model of one stream."""
    if SPREAD.format(1) not in weights:
        return x_TD
    streams = [linear(x_TD, matrix) for matrix in _matrices(weights, SPREAD)]
    return jnp.stack([x_TD, *(_as_large_as(x_TD, one) for one in streams)])


def joined(x: jax.Array, weights: Weights) -> jax.Array:
    """Returns the mean of streams [A, T, D] that are scaled like the first: hidden states [T, D],
    which those of a model of one stream are already.
    """
    if JOIN.format(1) not in weights:
        return x
    streams = map(linear, x[1:], _matrices(weights, JOIN))
    return sum((_as_large_as(x[0], one) for one in streams), x[0]) / x.shape[0]


def predict(x_ATD: jax.Array, w: Weights, spec: ModelSpec) -> jax.Array:
    """Returns what a layer expects the streams to be, before its blocks are run on the first."""
    num_streams = x_ATD.shape[0]
    weight_TF = linear(_routed(x_ATD[0], w, spec), w["altup_predict"])
    weight_TAA = weight_TF.reshape(-1, num_streams, num_streams)
    # One after the other: what a matmul of so few numbers adds up first may depend on T.
    terms = (weight_TAA[:, :, i].T[..., None] * one_TD[None] for i, one_TD in enumerate(x_ATD))
    return sum(terms, x_ATD)


def correct(predicted_ATD: jax.Array, x_TD: jax.Array, w: Weights, spec: ModelSpec) -> jax.Array:
    """Returns the streams behind a layer whose blocks have made x of the first."""
    share_TA = linear(_routed(x_TD, w, spec), w["altup_correct"]) + 1
    return predicted_ATD + share_TA.T[..., None] * (x_TD - predicted_ATD[0])[None]


def _routed(x_TD: jax.Array, w: Weights, spec: ModelSpec) -> jax.Array:
    """Returns what a router says of tokens, [T, A], from -1 to 1."""
    h_TD = rms_norm(x_TD, w["altup_norm"], eps=spec.norm_eps) / spec.hidden_size
    return jnp.tanh(linear(h_TD, w[ROUTER]))


def _matrices(weights: Weights, name: str) -> list[Matrix]:
    found: list[Matrix] = []
    while (key := name.format(len(found) + 1)) in weights:
        found.append(Matrix(weights[key]))
    return found


def _as_large_as(wanted_TD: jax.Array, x_TD: jax.Array) -> jax.Array:
    """Scales x to the root mean square of what is wanted."""

    def mean_square(y_TD: jax.Array) -> jax.Array:
        return total(y_TD * y_TD)[:, None] / y_TD.shape[1]

    least = jnp.maximum(mean_square(x_TD), LEAST)
    return x_TD * jnp.sqrt(mean_square(wanted_TD) / least)
