"""Gives the jnp oracle of every kernel: simple and slow. A kernel is right if it equals these.

Pages are [L*P, 2K, S, H]: page p of layer l is row l*P + p, heads 0..K-1 are keys, K..2K-1 values.
Axes: B rows, T packed tokens, W pages per row, S slots per page, N query heads, K KV heads, H head
dim.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Statistics(NamedTuple):
    """Says what the softmax of each token and query head is like, whose scaled (and capped) scores
    are s with max m; a sink is one more of them.

    sum_TN l = sum of e^(s-m); entropy_TN a = sum of e^(s-m) (s-m): the entropy is log l - a/l.
    mass_TNW: the weights summed over each table page, the sink's left out.
    """

    sum_TN: jax.Array
    entropy_TN: jax.Array
    mass_TNW: jax.Array


def ragged_paged_attention(
    q_TNH: jax.Array,
    pages: jax.Array,
    table_BW: jax.Array,
    first_BW: jax.Array,
    len_B: jax.Array,
    row_T: jax.Array,
    position_T: jax.Array,
    *,
    layer: int | jax.Array,
    num_pages: int,
    scale: float,
    window: int | jax.Array | None = None,
    softcap: float | None = None,
    sinks_N: jax.Array | None = None,
) -> tuple[jax.Array, Statistics]:
    """Returns softmax(scale * q k^T) v of every packed token over the slots that its row holds, and
    says what the softmax was like.

    A token of row r at position p sees those of the first len_B[r] slots of r's table whose
    position is at most p and, with a window, above p - window. Slot s of table page w has position
    first_BW[r, w] + s. Memory that a token does not see never matters, NaN included; a token that
    sees nothing, and padding (row_T = B), gets zeros. With a softcap c a score s becomes c tanh(s /
    c). A sink, a logit per query head, joins the softmax's sum and has no value.

    -> (out [T, N, H], statistics): float32, or float64 where that is enabled.
    Units: len_B, positions and window in tokens; `num_pages` is P, the pages of one layer. pages: a
    float dtype.
    Cost: gathers W*S keys and values per token, 2*T*W*S*K*H values.
    Source: scaled dot-product attention, arXiv 1706.03762, equation 1, over pages, arXiv
    2309.06180, equation 4.
    """
    num_tokens, num_heads, head_dim = q_TNH.shape
    num_rows, width = table_BW.shape
    page_size, kv_heads = pages.shape[2], pages.shape[1] // 2
    exact = jnp.result_type(float)
    real_T = row_T < num_rows
    row_T = jnp.where(real_T, row_T, 0)
    x = pages[layer * num_pages + table_BW[row_T]].astype(exact)  # [T, W, 2K, S, H]
    x = x.transpose(0, 2, 1, 3, 4).reshape(num_tokens, 2 * kv_heads, width * page_size, head_dim)
    slot_J = jnp.arange(width * page_size)
    key_position_TJ = (first_BW[row_T][:, :, None] + jnp.arange(page_size)[None, None, :]).reshape(
        num_tokens, -1
    )
    distance_TJ = position_T[:, None] - key_position_TJ
    seen_TJ = real_T[:, None] & (slot_J[None, :] < len_B[row_T][:, None]) & (distance_TJ >= 0)
    if window is not None:
        seen_TJ &= distance_TJ < window
    # Cleared, not only masked: 0 x NaN is NaN.
    x = jnp.where(seen_TJ[:, None, :, None], x, 0.0)
    highest = jax.lax.Precision.HIGHEST
    q_TKGH = q_TNH.astype(exact).reshape(num_tokens, kv_heads, num_heads // kv_heads, head_dim)
    scores = scale * jnp.einsum("tkgh,tkjh->tkgj", q_TKGH, x[:, :kv_heads], precision=highest)
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    scores = jnp.where(seen_TJ[:, None, None, :], scores, -1e30)
    sinks = jnp.full(num_heads, -1e30, exact) if sinks_N is None else sinks_N.astype(exact)
    all_scores = jnp.concatenate(
        [scores, jnp.broadcast_to(sinks.reshape(1, kv_heads, -1, 1), (*scores.shape[:3], 1))],
        axis=-1,
    )
    top = all_scores.max(axis=-1, keepdims=True)
    terms = jnp.where(all_scores > -1e30, jnp.exp(all_scores - top), 0.0)
    total = terms.sum(axis=-1)
    weights = terms[..., :-1] / jnp.where(total > 0, total, 1.0)[..., None]
    out = jnp.einsum("tkgj,tkjh->tkgh", weights, x[:, kv_heads:], precision=highest)
    entropy = (terms * (all_scores - top)).sum(axis=-1)
    mass = weights.reshape(num_tokens, num_heads, width, page_size).sum(axis=-1)
    total_TN, entropy_TN = (y.reshape(num_tokens, num_heads) for y in (total, entropy))
    out = out.reshape(num_tokens, num_heads, head_dim)
    return out, Statistics(total_TN, entropy_TN, mass)


def write_pages(
    pages: jax.Array,
    k_TKH: jax.Array,
    v_TKH: jax.Array,
    dest_T: jax.Array,
    *,
    layer: int | jax.Array,
    num_pages: int,
) -> jax.Array:
    """Stores one key and one value row per token in its slot, rounded to the pages' dtype.

    Units: dest_T is page * S + slot within the layer; a dest_T of P * S or more is padding and
    stores nothing (it must not land in page 0 of the next layer). Cost: 2*T*K*H values, in place
    when donated.
    Source: arXiv 2309.06180, section 4.
    """
    page_size = pages.shape[2]
    row_T = jnp.where(
        dest_T < num_pages * page_size, layer * num_pages + dest_T // page_size, pages.shape[0]
    )
    values = jnp.concatenate([k_TKH, v_TKH], axis=1).astype(pages.dtype)
    return pages.at[row_T, :, dest_T % page_size].set(values, mode="drop")
