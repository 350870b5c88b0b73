"""Latent attention: all that a token leaves in the cache is one row for all heads, a latent from
which each head could make its key and value, and behind it a key part that is rotated.

Attention runs in two forms that compute the same. Absorbed, a query goes through W_uk once and
meets the rows as they are, and what it has gathered of them goes through W_uv. Expanded, rows go
through both and are keys and values as in attention of other kinds, which pays where many queries
meet them (`ops.attention.expanded`). Source: DeepSeek-V2, arXiv 2405.04434, section 2.1.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.axes import Array
from jaxkv.models.spec import IndexSpec, ModelSpec
from jaxkv.ops.attention import Index
from jaxkv.ops.layers import layer_norm, linear, rms_norm
from jaxkv.ops.matrices import HeadMatrices, values
from jaxkv.ops.rotation import Rotation, apply_rope
from jaxkv.weights.tree import Weights

Chooser = tuple[Index, Array]
"""Chooses keys for tokens, and holds their own keys [T, 1, H] for being chosen."""


class Before(NamedTuple):
    """Holds what layers leave to those behind them, which store it in rows of their own: attention
    reads the pages of its own layer only.

    chooser: what has chosen in the last layer with index heads (`IndexSpec.has_shared`). latents:
    of the last sources (`AttentionSpec.latent_sources`) with a rotated part [T, 1, R + P] and
    without one [T, 1, R]. None where no layer takes any.
    """

    chooser: Chooser | None = None
    latents: tuple[Array, Array] | None = None

    @classmethod
    def empty(cls, num_tokens: int, spec: ModelSpec) -> Before:
        """Returns zeros for so many tokens."""
        chooser, latents, asked = None, None, spec.attention.index
        if isinstance(asked, IndexSpec) and asked.has_shared:
            heads = (num_tokens, asked.num_heads)
            q_TIH, weight_TI = jnp.zeros((*heads, asked.head_dim)), jnp.zeros(heads)
            index = Index(q_TIH, weight_TI, asked.num_chosen, asked.pool)
            chooser = index, jnp.zeros((num_tokens, 1, index.key_dim))
        if spec.attention.latent_sources:
            rank = spec.groups[0].latent_dim or 0
            rotated, plain = (
                jnp.zeros((num_tokens, 1, size)) for size in (rank + spec.rope.dim, rank)
            )
            latents = rotated, plain
        return cls(chooser, latents)


class Projected(NamedTuple):
    """Holds what latent attention makes of tokens: queries [T, N, C + P], as they would meet keys;
    their rows [T, 1, R + P], a latent of R numbers and P rotated ones, and behind them, where keys
    are chosen, the row's key for that; what chooses for these tokens; what gates are made of, which
    is x, or what queries are made of where that is their latent twice, behind its norm and before
    it; and what is left to layers behind. There are no values: they are the latents
    (`KVGroup.latent_dim`).
    """

    q_TNH: Array
    row_T1H: Array
    choice: Index | None
    gate_TX: Array
    before: Before


def project(
    x_TD: Array,
    w: Weights,
    rope: Rotation | None,
    spec: ModelSpec,
    row_size: int,
    position_T: Array,
    number: Array,
    before: Before,
) -> Projected:
    """Computes what tokens are in layer `number` (int32), whose rows have so many numbers. before:
    what layers before it have left, which takes the place of index heads and of latents where this
    one has none.
    """
    up: HeadMatrices = w["k_up"]
    h_TD = query_TX = gate_TX = x_TD
    if "q_down" in w:
        low_TQ = linear(x_TD, w["q_down"], w.get("q_down_bias"))
        h_TD = query_TX = _normed(low_TQ, w, "q_down", spec)
        if w["q"].num_columns == 2 * low_TQ.shape[1]:
            query_TX = gate_TX = jnp.concatenate([h_TD, low_TQ], axis=1)
    # As in attention of other kinds: else XLA may split the weight into heads, not the result.
    q_TF = jax.lax.optimization_barrier(linear(query_TX, w["q"]))
    q_TNH = _grown(q_TF.reshape(x_TD.shape[0], up.num_heads, -1), w, "q", position_T)
    num_plain = up.num_columns
    if rope is not None:
        rotated = apply_rope(q_TNH[..., num_plain:], rope)
        q_TNH = jnp.concatenate([q_TNH[..., :num_plain], rotated], axis=-1)
    latent_T1X, before = _latents(x_TD, w, rope, spec, number, before)
    parts, chooser = [latent_T1X], before.chooser
    if isinstance(spec.attention.index, IndexSpec) and "index_q" in w:
        chooser = _chooser(x_TD, h_TD, w, rope, spec.attention.index, position_T)
        before = before if before.chooser is None else before._replace(chooser=chooser)
    if chooser is not None:
        missing = row_size - chooser[1].shape[2] - latent_T1X.shape[2]
        parts += [jnp.zeros((*latent_T1X.shape[:2], missing), jnp.float32), chooser[1]]
    row_T1H, choice = jnp.concatenate(parts, axis=-1), chooser and chooser[0]
    return Projected(q_TNH, row_T1H, choice, gate_TX, before)


def _latents(
    x_TD: Array, w: Weights, rope: Rotation | None, spec: ModelSpec, number: Array, before: Before
) -> tuple[Array, Before]:
    """Computes latents and rotated parts [T, 1, R + P], those of a layer before where this one has
    none of its own. Returns them, and what is left to layers behind.
    """
    kind, sources = int(rope is None), spec.attention.latent_sources
    if "kv_down" not in w:
        if before.latents is None:
            raise ValueError("expected latents of a layer before, got none")
        return before.latents[kind], before
    row_TF = jax.lax.optimization_barrier(linear(x_TD, w["kv_down"], w.get("kv_down_bias")))
    row_T1X, up = row_TF[:, None], w["k_up"]
    latent_T1R = _normed(row_T1X[..., : up.num_rows], w, "kv_down", spec)
    rotated_T1P = row_T1X[..., up.num_rows :]
    if "rotated_norm" in w:
        eps = spec.attention.latent_eps
        rotated_T1P = rms_norm(rotated_T1P, values(w["rotated_norm"]), eps=eps)
    if rope is not None:
        rotated_T1P = apply_rope(rotated_T1P, rope)
    latent_T1X = jnp.concatenate([latent_T1R, rotated_T1P], axis=-1)
    if before.latents is None:
        return latent_T1X, before
    is_source = jnp.isin(number, np.array(sources, np.int32))
    kept = list(before.latents)
    kept[kind] = jnp.where(is_source, latent_T1X, kept[kind])
    return latent_T1X, before._replace(latents=(kept[0], kept[1]))


def _normed(x: Array, w: Weights, name: str, spec: ModelSpec) -> Array:
    """Returns what a matrix of this name makes smaller, [.., R], behind its norm."""
    normed = rms_norm(x, values(w[f"{name}_norm"]), eps=spec.attention.latent_eps)
    if not spec.attention.scales_latents:
        return normed
    return normed * (spec.hidden_size / x.shape[-1]) ** 0.5


def _grown(q_TNH: Array, w: Weights, name: str, position_T: Array) -> Array:
    """Returns queries grown by a * ln(position + 1) + b, with a and b of each head, where the
    weights have them. Source: Scalable-Softmax, arXiv 2501.19399, as Mistral Large 4 has it.
    """
    if f"{name}_growth" not in w:
        return q_TNH
    a_N, b_N = (values(w[f"{name}_growth{end}"]) for end in ("", "_bias"))
    log_T = jnp.log((position_T + 1).astype(jnp.float32))
    return q_TNH * (a_N[None] * log_T[:, None] + b_N[None])[..., None]


def _chooser(
    x_TD: Array,
    h_TQ: Array,
    w: Weights,
    rope: Rotation | None,
    asked: IndexSpec,
    position_T: Array,
) -> Chooser:
    """Computes what chooses keys for these tokens by the layer's own index heads.

    h_TQ: what index heads' queries are made of, where that is not the stream behind a norm of
    theirs. Source: DeepSeek-V3.2's reference code.
    """

    def normed(y_TX: Array, name: str) -> Array:
        scale, bias = (values(w[f"{name}_norm{end}"]).astype(jnp.float32) for end in ("", "_bias"))
        return layer_norm(y_TX, scale, bias, eps=asked.norm_eps)

    h_TQ = normed(x_TD, "index_q") if "index_q_norm" in w else h_TQ
    q_TIH = linear(h_TQ, w["index_q"]).reshape(x_TD.shape[0], asked.num_heads, asked.head_dim)
    q_TIH = _grown(q_TIH, w, "index_q", position_T)
    key_T1H = normed(linear(x_TD, w["index_k"]), "index_k")[:, None]
    if rope is not None:
        rope = rope._replace(interleaved=asked.interleaved)
        if asked.rotates_last:  # those come first then, of both, which no score sees
            width = 2 * rope.cos_TP.shape[1]
            q_TIH, key_T1H = (jnp.roll(x, width, axis=2) for x in (q_TIH, key_T1H))
        q_TIH, key_T1H = apply_rope(q_TIH, rope), apply_rope(key_T1H, rope)
    factor = (asked.num_heads * asked.head_dim) ** -0.5
    weight_TI = linear(x_TD, w["index_weight"]) * factor
    if asked.pool > 1:  # how much a key counts in its pool, by place
        place_PH = values(w["index_place"]).astype(jnp.float32).reshape(asked.pool, -1)
        place_TH = place_PH[position_T % asked.pool]
        counts_TH = linear(x_TD, w["index_counts"]) + place_TH
        key_T1H = jnp.concatenate([key_T1H, counts_TH[:, None]], axis=-1)
    return Index(q_TIH, weight_TI, asked.num_chosen, asked.pool), key_T1H
