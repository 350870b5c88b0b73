"""Runs a layer that predicts later tokens out of the model's hidden states (multi-token
prediction).

M [norm(embedding of a token); norm(hidden state of the one before it)] goes through a block like
the model's, whose keys and values are the layer's own, and behind a norm of its own through the
model's head. Source: arXiv 2412.19437, section 2.2.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxkv.axes import MeshAxes
from jaxkv.kv.state import PagedKV
from jaxkv.models import decoder
from jaxkv.models.spec import ModelSpec
from jaxkv.models.stream import normed
from jaxkv.ops.attention import Attention, Batch
from jaxkv.ops.layers import linear
from jaxkv.ops.matrices import Matrix
from jaxkv.weights.tree import HEAD, Weights


def with_shared(own: Weights, weights: Weights) -> Weights:
    """Returns the layer's tree (`families.predictor`) with the embeddings and the head of the
    model's weights, where it has none of its own.
    """
    found = {**own, "embed": own.get("own_tokens", weights["embed"])}
    if "own_head" in own:
        return {**found, HEAD: own["own_head"]}
    return {name: leaf for name, leaf in decoder.head_of(weights).items() if name != "norm"} | found


def predict(
    weights: Weights,
    kv: PagedKV,
    batch: Batch,
    hidden_TD: jax.Array,
    *,
    spec: ModelSpec,
    backend: str | Attention,
    axis: MeshAxes | None = None,
) -> tuple[PagedKV, jax.Array]:
    """Runs the packed tokens through the layer and stores its keys and values.

    weights: as `with_shared` returns them. hidden_TD: float32, of the token before each, behind the
    model's final norm; or behind this layer's own, where that has predicted the token.
    Returns the new state and what `decoder.logits` makes logits of the token after it from, [T, D]
    float32.
    """
    token_TD = decoder.embed(weights, batch.token_T, spec=spec, axis=axis)
    joined = [
        normed(token_TD, weights, "token_norm", spec),
        normed(hidden_TD, weights, "hidden_norm", spec),
    ]
    x_TD = linear(jnp.concatenate(joined, axis=1), Matrix(weights["join"]))
    kv, x_TD, _ = decoder.forward(
        weights, kv, batch, spec=spec, backend=backend, axis=axis, embedded_TD=x_TD
    )
    return kv, x_TD
