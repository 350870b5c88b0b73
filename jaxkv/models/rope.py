"""Rotary frequencies of a model: what its `RopeSpec` means in numbers."""

from __future__ import annotations

import numpy as np

from jaxkv.models.spec import ModelSpec
from jaxkv.ops.layers import default_inv_freq, llama3_inv_freq, yarn_inv_freq


def rope_frequencies(spec: ModelSpec) -> tuple[np.ndarray, float]:
    """Computes (inverse frequencies [H/2] float32, factor on cos and sin).

    Raises: ValueError for a rope kind that is not known.
    """
    rope, head_dim = spec.rope, spec.head_dim
    if rope.kind == "yarn":
        inv_freq = yarn_inv_freq(
            rope.theta,
            head_dim,
            factor=rope.factor,
            original_max_len=rope.original_max_len,
            beta_fast=rope.beta_fast,
            beta_slow=rope.beta_slow,
            truncate=rope.truncate,
        )
        return inv_freq, rope.attention_factor
    inv_freq = default_inv_freq(rope.theta, head_dim)
    if rope.kind == "linear":
        inv_freq = (inv_freq / np.float32(rope.factor)).astype(np.float32)
    elif rope.kind == "llama3":
        inv_freq = llama3_inv_freq(
            inv_freq,
            factor=rope.factor,
            low_freq_factor=rope.low_freq_factor,
            high_freq_factor=rope.high_freq_factor,
            original_max_len=rope.original_max_len,
        )
    elif rope.kind != "default":
        raise ValueError(f"rope kind: expected default, linear, llama3 or yarn, got {rope.kind!r}")
    return inv_freq, 1.0
