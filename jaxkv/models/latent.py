"""Latent attention: all that a token leaves in the cache is one row for all heads, a latent from
which each head could make its key and value, and behind it a key part that is rotated.

Attention runs in two forms that compute the same. Absorbed, a query goes through W_uk once and
meets the rows as they are, and what it has gathered of them goes through W_uv. Expanded, rows go
through both and are keys and values as in attention of other kinds, which pays where many queries
meet them (`ops.attention.expanded`). Source: DeepSeek-V2, arXiv 2405.04434, section 2.1.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxkv.axes import Array
from jaxkv.models.spec import IndexSpec, ModelSpec
from jaxkv.ops.attention import Index
from jaxkv.ops.layers import layer_norm, linear, rms_norm
from jaxkv.ops.matrices import HeadMatrices, values
from jaxkv.ops.rotation import Rotation, apply_rope
from jaxkv.weights.tree import Weights

Chooser = tuple[Index, Array]
"""Chooses keys for tokens, and holds their own keys [T, 1, H] for being chosen."""


def project(
    x_TD: Array,
    w: Weights,
    rope: Rotation | None,
    spec: ModelSpec,
    position_T: Array,
    before: Chooser | None,
) -> tuple[Array, Array, Chooser | None, Array]:
    """Computes queries [T, N, C + P], as they would meet keys, and the rows [T, 1, R + P] of these
    tokens: a latent of R numbers and P rotated ones; behind them, where keys are chosen, the row's
    key for that, and then what chooses for these tokens; and last what gates are made of, which is
    x, or what queries are made of where that is their latent twice, behind its norm and before it.
    There are no values: they are the latents (`KVGroup.latent_dim`).

    before: what has chosen in the layer before, and does so in this one if it has no index heads.
    Its keys are stored in the rows of both: attention reads the pages of its own layer only.
    """
    up: HeadMatrices = w["k_up"]
    h_TD = query_TX = gate_TX = x_TD
    if "q_down" in w:
        low_TQ = linear(x_TD, w["q_down"], w.get("q_down_bias"))
        h_TD = query_TX = rms_norm(low_TQ, values(w["q_down_norm"]), eps=spec.attention.latent_eps)
        if w["q"].num_columns == 2 * low_TQ.shape[1]:
            query_TX = gate_TX = jnp.concatenate([h_TD, low_TQ], axis=1)
    # As in attention of other kinds: else XLA may split the weight into heads, not the result.
    q_TF = jax.lax.optimization_barrier(linear(query_TX, w["q"]))
    q_TNH = q_TF.reshape(x_TD.shape[0], up.num_heads, -1)
    row_TF = jax.lax.optimization_barrier(linear(x_TD, w["kv_down"], w.get("kv_down_bias")))
    row_T1H = row_TF[:, None]
    rank, num_plain = up.num_rows, up.num_columns
    latent_T1R = rms_norm(
        row_T1H[..., :rank], values(w["kv_down_norm"]), eps=spec.attention.latent_eps
    )
    if spec.attention.latent_factor != 1.0:
        latent_T1R *= spec.attention.latent_factor
    rotated = [q_TNH[..., num_plain:], row_T1H[..., rank:]]
    if rope is not None:
        rotated = [apply_rope(x, rope) for x in rotated]
    q_TNH = jnp.concatenate([q_TNH[..., :num_plain], rotated[0]], axis=-1)
    parts, chooser = [latent_T1R, rotated[1]], before
    if isinstance(spec.attention.index, IndexSpec) and "index_q" in w:
        chooser = _chooser(x_TD, h_TD, w, rope, spec.attention.index, position_T)
    if chooser is not None:
        missing = spec.groups[0].head_dim - chooser[1].shape[2] - latent_T1R.shape[2]
        missing -= rotated[1].shape[2]
        parts += [jnp.zeros((*row_T1H.shape[:2], missing), jnp.float32), chooser[1]]
    return q_TNH, jnp.concatenate(parts, axis=-1), chooser, gate_TX


def no_chooser(num_tokens: int, asked: IndexSpec) -> Chooser:
    """Returns zeros in the place of what chooses keys for so many tokens."""
    heads = (num_tokens, asked.num_heads)
    q_TIH, weight_TI = jnp.zeros((*heads, asked.head_dim)), jnp.zeros(heads)
    index = Index(q_TIH, weight_TI, asked.num_chosen, asked.pool)
    return index, jnp.zeros((num_tokens, 1, index.key_dim))


def _chooser(
    x_TD: Array,
    h_TQ: Array,
    w: Weights,
    rope: Rotation | None,
    asked: IndexSpec,
    position_T: Array,
) -> Chooser:
    """Computes what chooses keys for these tokens by the layer's own index heads.

    h_TQ: what index heads' queries are made of. Source: DeepSeek-V3.2's reference code.
    """
    q_TIH = linear(h_TQ, w["index_q"]).reshape(x_TD.shape[0], asked.num_heads, asked.head_dim)
    scale, bias = (values(w[f"index_k_norm{end}"]).astype(jnp.float32) for end in ("", "_bias"))
    key_T1H = layer_norm(linear(x_TD, w["index_k"]), scale, bias, eps=asked.norm_eps)[:, None]
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
