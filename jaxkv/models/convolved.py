"""Attention whose queries and keys see the last tokens: a convolution by channel and then one by
head runs over both, beside which they stay as they are, and half of the values are those of the
token before. Source: compressed convolutional attention, arXiv 2510.04476, section 3.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxkv.axes import Array, MeshAxes
from jaxkv.models.recurrent import Convolved
from jaxkv.ops.layers import linear, total, total_over
from jaxkv.ops.recurrent import Rows, short_conv
from jaxkv.ops.rotation import Rotation, apply_rope
from jaxkv.weights.tree import Weights

MIX = "k_mix"
"""A leaf that only such layers have."""

LEAST = 2.0**-23
"""The least length that queries and keys are divided by."""

States = tuple[Array, ...]


def project(
    x_TD: Array,
    w: Weights,
    rope: Rotation | None,
    keeper: Convolved,
    states: States,
    rows: Rows,
    *,
    head_dim: int,
    axis: MeshAxes | None,
) -> tuple[Array, Array, Array, States]:
    """Computes rotated queries [T, N, H] and keys [T, K, H], values [T, K, H], and the states after
    these tokens. axis: the mesh axis over which heads are divided.
    """
    last, *inputs = states
    num_tokens = len(x_TD)
    of_both = [
        jax.lax.optimization_barrier(linear(x_TD, w[name], w.get(f"{name}_bias"))) for name in "qk"
    ]
    q_TNH, k_TKH = (x.reshape(num_tokens, -1, head_dim) for x in of_both)
    num_heads, num_kv_heads = q_TNH.shape[1], k_TKH.shape[1]
    seen_TXH, inputs = _convolved(jnp.concatenate(of_both, axis=1), w, keeper, inputs, rows)
    grouped = (num_tokens, num_kv_heads, num_heads // num_kv_heads, head_dim)
    beside_TKGH = (q_TNH.reshape(grouped) + k_TKH[:, :, None]) * 0.5
    q_TNH = _mixed(seen_TXH[:, :num_heads], w, "q") + beside_TKGH.reshape(q_TNH.shape)
    k_TKH = _mixed(seen_TXH[:, num_heads:], w, "k") + total_over(beside_TKGH, 2) / grouped[2]
    q_TNH = _of_length(q_TNH, head_dim**0.5)
    k_TKH = _of_length(k_TKH, head_dim**0.5) * w["k_gain"].astype(jnp.float32)[None, :, None]
    v_TF, last = _values(x_TD, w, last, rows, axis)
    if rope is not None:
        q_TNH, k_TKH = apply_rope(q_TNH, rope), apply_rope(k_TKH, rope)
    return q_TNH, k_TKH, v_TF.reshape(k_TKH.shape), (last, *inputs)


def _convolved(
    x_TX: Array, w: Weights, keeper: Convolved, states: list[Array], rows: Rows
) -> tuple[Array, list[Array]]:
    """Convolves each channel. Returns what heads mix of it, [T, N + K, H * tokens], those of the
    same channel side by side with the oldest first, and the states after these tokens.
    """
    first, *later = states
    names = ("q_conv", "k_conv")
    kernel_XK = jnp.concatenate([w[name].reshape(-1, keeper.widths[0]) for name in names])
    bias_X = jnp.concatenate([w[f"{name}_bias"] for name in names]).astype(jnp.float32)
    y_TX, first = short_conv(x_TX, kernel_XK, first, rows)
    seen, kept = [y_TX], [first]
    for pool in later:
        y_TX, pool = _before(seen[0], pool, rows)
        seen, kept = [y_TX, *seen], [*kept, pool]
    # The bias is there before a row's first token too.
    seen_TXJ = jnp.stack(seen, axis=-1) + bias_X[None, :, None]
    return seen_TXJ.reshape(len(x_TX), -1, w[MIX].num_columns), kept


def _mixed(seen_TNX: Array, w: Weights, name: str) -> Array:
    y_TNH = w[f"{name}_mix"].dot(seen_TNX)
    return y_TNH + w[f"{name}_mix_bias"].astype(jnp.float32).reshape(1, *y_TNH.shape[1:])


def _values(
    x_TD: Array, w: Weights, last: Array, rows: Rows, axis: MeshAxes | None
) -> tuple[Array, Array]:
    """Computes values, whose second half is that of the token before, and the last ones of rows.
    Devices have whole heads of the result, and so all of what makes it.
    """
    now_TF, late_TF = (linear(x_TD, w[name]) for name in ("v", "v_late"))
    late_TF, last = _before(late_TF, last, rows)
    v_TF = jnp.concatenate([now_TF, late_TF], axis=1)
    if "v_bias" in w:
        bias_F = jnp.concatenate([w["v_bias"], w["v_late_bias"]])
        v_TF += bias_F.astype(jnp.float32)[None]
    if axis is not None:
        size = v_TF.shape[1] // jax.lax.axis_size(axis)
        v_TF = jax.lax.dynamic_slice_in_dim(v_TF, jax.lax.axis_index(axis) * size, size, axis=1)
    return v_TF, last


def _before(x_TX: Array, pool: Array, rows: Rows) -> tuple[Array, Array]:
    """Returns what came of the token before each, zeros before a row's first, and the last ones."""
    kernel_X2 = jnp.broadcast_to(jnp.array([1.0, 0.0]), (x_TX.shape[1], 2))
    return short_conv(x_TX, kernel_X2, pool, rows)


def _of_length(x: Array, length: float) -> Array:
    """Makes vectors over the last axis so long."""
    return x * (length / jnp.maximum(jnp.sqrt(total(x * x)), LEAST))[..., None]
