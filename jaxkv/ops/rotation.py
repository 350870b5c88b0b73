"""Rotates heads by position, and the frequencies of each kind of rotary embedding."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxkv.axes import Array


class Rotation(NamedTuple):
    """Holds cos and sin [T, dim/2] of the first `dim` dimensions of each head, which are paired as
    `RopeSpec.interleaved` says.
    """

    cos_TP: Array
    sin_TP: Array
    interleaved: bool = False


def rope_tables(
    position_T: Array, inv_freq: np.ndarray | Array, factor: float
) -> tuple[Array, Array]:
    """Returns (cos, sin) [T, P] float32, times YaRN's attention factor; inv_freq [P] or [T, P]."""
    angle = position_T.astype(jnp.float32)[:, None] * jnp.atleast_2d(
        jnp.asarray(inv_freq, jnp.float32)
    )
    return jnp.cos(angle) * factor, jnp.sin(angle) * factor


def apply_rope(x_TNH: Array, rotation: Rotation) -> Array:
    """Rotates every head, or the first dimensions of it.

    Source: arXiv 2104.09864, equation 34; without interleaving with dimension i paired with i +
    dim/2 ("rotate half" order of Hugging Face checkpoints).
    """
    cos, sin = rotation.cos_TP[:, None, :], rotation.sin_TP[:, None, :]
    dim = 2 * cos.shape[-1]
    x, rest = x_TNH[..., :dim].astype(jnp.float32), x_TNH[..., dim:].astype(jnp.float32)
    if rotation.interleaved:
        lower, upper = x[..., 0::2], x[..., 1::2]
        pairs = jnp.stack([lower * cos - upper * sin, upper * cos + lower * sin], axis=-1)
        return jnp.concatenate([pairs.reshape(x.shape), rest], axis=-1)
    lower, upper = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([lower * cos - upper * sin, upper * cos + lower * sin, rest], axis=-1)


def default_inv_freq(theta: float, head_dim: int) -> np.ndarray:
    """Computes theta^(-2i/H) for i in [0, H/2), float32."""
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    return (1.0 / np.float32(theta) ** exponent).astype(np.float32)


def proportional_inv_freq(theta: float, head_dim: int, part: float, factor: float) -> np.ndarray:
    """Computes default frequencies, divided by `factor`, for that part of the pairs and 0 for the
    others, which thus are not rotated. Source: Gemma 4's reference code.
    """
    inv_freq = default_inv_freq(theta, head_dim) / np.float32(factor)
    inv_freq[int(part * head_dim // 2) :] = 0
    return inv_freq.astype(np.float32)


def llama3_inv_freq(
    inv_freq: np.ndarray,
    *,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_len: int,
) -> np.ndarray:
    """Slows low frequencies by `factor`, keeps high ones, blends between. Source: Llama 3.1's
    reference code.
    """
    wavelength = 2 * math.pi / inv_freq
    between = (high_freq_factor - low_freq_factor) or math.inf  # there is nothing there then
    smooth = (original_max_len / wavelength - low_freq_factor) / between
    blended = (1 - smooth) * inv_freq / factor + smooth * inv_freq
    low, high = original_max_len / low_freq_factor, original_max_len / high_freq_factor
    scaled = np.where(
        wavelength > low, inv_freq / factor, np.where(wavelength < high, inv_freq, blended)
    )
    return scaled.astype(np.float32)


def yarn_inv_freq(
    theta: float,
    head_dim: int,
    *,
    factor: float,
    original_max_len: int,
    beta_fast: float,
    beta_slow: float,
    truncate: bool,
) -> np.ndarray:
    """NTK-by-parts interpolation. Source: YaRN, arXiv 2309.00071, section 3.2."""

    def dim_of(rotations: float) -> float:
        """Returns the (fractional) dimension pair that makes this many rotations over the original
        context.
        """
        return (
            head_dim
            * math.log(original_max_len / (rotations * 2 * math.pi))
            / (2 * math.log(theta))
        )

    low, high = dim_of(beta_fast), dim_of(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = np.clip(
        (np.arange(head_dim // 2, dtype=np.float32) - low) / max(high - low, 0.001), 0, 1
    )
    inv_freq = default_inv_freq(theta, head_dim)
    return (inv_freq / factor * ramp + inv_freq * (1 - ramp)).astype(np.float32)
