"""Runs every family: a model is a `ModelSpec` and a weight tree (`weights.tree`).

Tokens are embedded, run through all layers (`models.layer`) and become logits. One body, compiled
once, runs all layers of a kind. Layers in different KV groups part only where they read and write
their pages: they pick their tables by number, and branch only between unlike stores.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.axes import MeshAxes
from jaxkv.kv.state import PagedKV, Statistics
from jaxkv.models import altup, depth, hyper, latent, passes, routing
from jaxkv.models.layer import Layers
from jaxkv.models.paged import PagedAttention
from jaxkv.models.rope import rope_frequencies
from jaxkv.models.spec import ModelSpec, RopeSpec, Sinusoid
from jaxkv.models.stream import moved, normed, scaled
from jaxkv.ops.attention import BACKENDS, Attention, Batch
from jaxkv.ops.layers import ACTIVATIONS, linear, soft_cap
from jaxkv.ops.matrices import Matrix, values
from jaxkv.weights.packing import DYNAMIC
from jaxkv.weights.tree import DRAFT, HEAD, Weights, draft_of, head_matrix, with_draft

HEAD_TOKENS = "head_tokens"
"""A leaf that says which tokens a head of fewer rows is for: how far behind each row's number its
token's is, [H] int32. The logits of all others are -inf.
"""

BESIDE_HEAD = ("head_bias", "head_gain")
BEFORE_HEAD = ("head_dense", "head_dense_bias", "head_norm", "head_norm_bias")
"""Leaves between the final norm and the head, which most models do not have."""


class Ran(NamedTuple):
    """Holds what `forward` returns: the new state (lengths grown by the step's tokens), the hidden
    states [T, D] float32 before the final norm, the statistics with those of the step added, and
    aux_TX: the streams that were asked for side by side, the hidden states where none was.
    """

    kv: PagedKV
    x_TD: jax.Array
    statistics: Statistics | None
    aux_TX: jax.Array


def forward(
    weights: Weights,
    kv: PagedKV,
    batch: Batch,
    statistics: Statistics | None = None,
    *,
    spec: ModelSpec,
    backend: str | Attention,
    axis: MeshAxes | None = None,
    embedded_TD: jax.Array | None = None,
    stream_TD: jax.Array | None = None,
    aux_layers: tuple[int, ...] = (),
) -> Ran:
    """Runs the packed tokens through all layers and stores their keys and values.

    `axis`: the mesh axis over which weights and pages are divided (`placement.Placement`), here and
    in `logits`. embedded_TD: what goes in, as `embed` gives it, in place of the batch's tokens; who
    gives that may want its gradient, so each layer is then computed again on the way back, which
    would else keep a copy of the weights. stream_TD: what comes into the first layer in place of
    the embeddings, which layers may read beside it. aux_layers: the layers, in order, of which the
    streams that come into them are asked for (auxiliary hidden states); the number of layers is
    what comes out of the last one.
    Cost: every array but the pages is of size T.
    """
    attention = BACKENDS[backend] if isinstance(backend, str) else backend
    num_devices = 1 if axis is None else jax.lax.axis_size(axis)
    attend = PagedAttention(attention, kv, batch, spec, num_devices)
    runs_again = embedded_TD is not None
    if embedded_TD is None:
        embedded_TD = embed(weights, batch.token_T, spec=spec, axis=axis)
    x_TD = scaled(embedded_TD, embed_scale(weights, spec))
    if "positions" in weights:
        position_T = jnp.asarray(batch.position_T)
        x_TD += values(weights["positions"].at[position_T].get(mode="clip")).astype(jnp.float32)
    if spec.scales.positions is not None:
        x_TD += _sinusoid(batch.position_T, spec.scales.positions, spec)
    x_TD = moved(normed(x_TD, weights, "embed_norm", spec), weights, "embed")
    x_TD = jnp.where(batch.is_row_T[:, None], x_TD, 0)  # nothing is multiplied with rows of zeros
    own_LTP = _per_layer(weights, batch.token_T, x_TD, spec) if "own_embed" in weights else None
    layers = Layers(weights, kv, batch, attend, own_LTP, x_TD, aux_layers, spec=spec, axis=axis)
    if stream_TD is not None:
        x_TD = jnp.where(batch.is_row_T[:, None], stream_TD, 0)
    # The pools are carried whole, with the layer's number beside them: as scan xs/ys they would be
    # copied (7.25 GiB against 0.1 MiB of temporaries for a 7 GiB pool, compiled for v5e).
    with jax.named_scope("layers"):  # by which `jaxkv check` knows the loop in a compiled program
        held = attend.held(statistics)
        if spec.has_shortcut:
            held = held._replace(aside_TD=jnp.zeros_like(x_TD))
        held = held._replace(
            before=latent.Before.empty(x_TD.shape[0], spec),
            view_TX=routing.empty(x_TD.shape[0], weights),
            kept_STD=passes.empty(x_TD, batch.is_row_T, weights, spec),
            given=depth.empty(x_TD, spec),
            aux_STD=jnp.zeros((len(aux_layers), *x_TD.shape), jnp.float32) if aux_layers else None,
        )
        carry = (hyper.spread(altup.spread(x_TD, weights), spec), held)
        layer = jax.checkpoint(layers) if runs_again else layers
        x, held = jax.lax.fori_loop(0, spec.num_layers, layer, carry)
    x_TD = altup.joined(hyper.joined(x, weights, spec), weights)
    x_TD = depth.joined(x_TD, held.given, weights)
    aux = [x_TD] if held.aux_STD is None else list(held.aux_STD)
    if aux_layers[-1:] == (spec.num_layers,):
        aux[-1] = x_TD
    statistics = _of_all_devices(held.statistics, statistics, axis)
    return Ran(attend.state(held), x_TD, statistics, jnp.concatenate(aux, axis=1))


def _sinusoid(position_T: jax.Array, asked: Sinusoid, spec: ModelSpec) -> jax.Array:
    """Computes embeddings of positions, [T, D]."""
    of_pair_C = rope_frequencies(RopeSpec(theta=asked.theta), spec.hidden_size)
    position_T = (jnp.asarray(position_T) + asked.offset).astype(jnp.float32)
    angle_TC = position_T[:, None] * jnp.asarray(of_pair_C, jnp.float32)[None]
    return jnp.concatenate([jnp.sin(angle_TC), jnp.cos(angle_TC)], axis=1)


def _per_layer(weights: Weights, token_T: jax.Array, x_TD: jax.Array, spec: ModelSpec) -> jax.Array:
    """Computes what each layer gets of the tokens beside the stream, [L, T, P]: half of it looked
    up, half projected from their embeddings. Source: Gemma 3n's and Gemma 4's reference code.
    """
    width = weights["own_embed"].shape[1] // spec.num_layers
    shape = (x_TD.shape[0], spec.num_layers, width)
    # Tokens that the table is too small for (Gemma 3n's of images) have those of the first.
    token_T = jnp.where(token_T < weights["own_embed"].shape[0], token_T, 0)
    found = values(weights["own_embed"].at[token_T].get(mode="clip")).astype(jnp.float32)
    projected = linear(x_TD, Matrix(weights["own_proj"])).reshape(shape) * spec.hidden_size**-0.5
    projected = normed(projected, weights, "own_norm", spec)
    both_TLP = (projected + found.reshape(shape) * width**0.5) * 2**-0.5
    return both_TLP.transpose(1, 0, 2)


def head_of(weights: Weights) -> Weights:
    """Returns what `logits` takes of the weights: the final norm, and the head or the embeddings
    that are it.
    """
    head = HEAD if HEAD in weights else "embed"
    names = {"norm", "norm_bias", "head_down", head, HEAD + DYNAMIC, *BESIDE_HEAD, *BEFORE_HEAD}
    return {name: leaf for name, leaf in weights.items() if name in names}


def body_of(weights: Weights) -> Weights:
    """Returns what `forward` takes of the weights, and of a draft model's in them: no head that is
    not the embeddings, and the final norm only for a layer behind it (`models.predictor`).
    """
    unread = {*head_of(weights), "own_head", HEAD_TOKENS} - {"embed"}
    if DRAFT in weights and "embed" not in draft_of(weights):
        unread -= {"norm"}
    body = {name: leaf for name, leaf in weights.items() if name not in unread}
    return with_draft(body, body_of(draft_of(weights))) if DRAFT in weights else body


def logits(
    weights: Weights, x_TD: jax.Array, *, spec: ModelSpec, axis: MeshAxes | None = None
) -> jax.Array:
    """Applies the final norm and the head: [T, D] -> [T, V] float32."""
    x_TD = normed(x_TD, weights, "norm", spec)
    if "head_dense" in weights:
        matrix = Matrix(weights["head_dense"])
        bias_D = values(weights["head_dense_bias"]) if "head_dense_bias" in weights else None
        x_TD = ACTIVATIONS[spec.activation](linear(x_TD, matrix, bias_D))
        x_TD = normed(x_TD, weights, "head_norm", spec)
    if "head_down" in weights:
        x_TD = linear(x_TD, Matrix(weights["head_down"]))
    bias_V = values(weights["head_bias"]) if "head_bias" in weights else None
    part_TV = linear(x_TD, head_matrix(weights), bias_V)
    if "head_gain" in weights:
        part_TV *= values(weights["head_gain"]).astype(jnp.float32)[None]
    part_TV = scaled(part_TV, spec.scales.logits)
    if spec.scales.logit_cap:
        part_TV = soft_cap(part_TV, spec.scales.logit_cap)
    offset_H = weights.get(HEAD_TOKENS)
    num_rows = spec.vocab_size if offset_H is None else len(offset_H)
    if axis is not None and part_TV.shape[1] < num_rows:
        part_TV = jax.lax.all_gather(part_TV, axis, axis=1, tiled=True)
    if offset_H is None:
        return part_TV
    token_H = jnp.arange(len(offset_H)) + offset_H
    none_TV = jnp.full((x_TD.shape[0], spec.vocab_size), -jnp.inf, jnp.float32)
    return none_TV.at[:, token_H].set(part_TV, mode="drop")


def embed(
    weights: Weights, token_T: jax.Array, *, spec: ModelSpec, axis: MeshAxes | None = None
) -> jax.Array:
    """Looks up the tokens' embeddings [T, D] float32, of which a device may have some rows, and
    takes smaller ones to the stream's size. They are as stored: `forward` scales them.
    """
    x_TD = _embedded(weights["embed"], token_T, spec, axis)
    return linear(x_TD, Matrix(weights["embed_up"])) if "embed_up" in weights else x_TD


def embed_scale(weights: Weights, spec: ModelSpec) -> float:
    """Returns the factor on embeddings, in their dtype where the model was trained so."""
    factor = spec.scales.embed
    if not spec.scales.embed_is_rounded:
        return factor
    return float(np.asarray(factor, jax.eval_shape(values, weights["embed"]).dtype))


def _embedded(
    embed_VD: jax.Array, token_T: jax.Array, spec: ModelSpec, axis: MeshAxes | None
) -> jax.Array:
    num_rows = embed_VD.shape[0]
    if axis is None or num_rows == spec.vocab_size:
        return values(embed_VD.at[token_T].get(mode="clip")).astype(jnp.float32)
    local_T = token_T - jax.lax.axis_index(axis) * num_rows
    x_TD = values(embed_VD.at[local_T].get(mode="clip")).astype(jnp.float32)
    return jax.lax.psum(jnp.where(((local_T >= 0) & (local_T < num_rows))[:, None], x_TD, 0), axis)


def _of_all_devices(
    statistics: Statistics | None, before: Statistics | None, axis: MeshAxes | None
) -> Statistics | None:
    """Adds up over devices what their own heads have added to the statistics."""
    if axis is None or statistics is None:
        return statistics
    gained = jax.tree.map(lambda x, y: jax.lax.psum(x - y, axis), statistics, before)
    return jax.tree.map(jnp.add, before, gained)
