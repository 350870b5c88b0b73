"""Four bits per value after a rotation, with a scale and a middle per token and head."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxkv.kv.codecs import parts
from jaxkv.kv.codecs.base import Elements, RotatingCodec
from jaxkv.kv.codecs.parts import SMALLEST, as_bytes, of_bytes, to_bfloat16

MIDDLE = 7.5
"""Of the codes 0 to 15."""

COVERED = 0.95
"""Part of a vector's range that the codes cover: what the few values at its ends lose, the steps
between all others more than win (5% of the squared error of 64 normal numbers, 7% of 128).
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Int4Codec(RotatingCodec):
    """Stores of each rotated vector: H/2 bytes (value i with value i + H/2), then scale and middle
    of its range as bfloat16.

    dtype: in which matmuls take the codes less their middle, bfloat16 or float32 (both hold them
    all).
    Source of rotating before: QuaRot, arXiv 2404.00456.
    """

    dtype: str

    @property
    def name(self) -> str:
        return "int4"

    def width(self, head_dim: int) -> int:
        if head_dim % 2:
            raise ValueError(f"kv_cache_dtype: int4 expects an even head_dim, got {head_dim}")
        return head_dim // 2 + 4

    def quantise(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns (codes [..., H] uint8, scale [...], middle [...]) of float vectors [..., H]."""
        x = parts.rotate(x.astype(jnp.float32))
        low, high = jnp.min(x, axis=-1), jnp.max(x, axis=-1)
        scale = jnp.maximum(to_bfloat16((high - low) * (COVERED / 15)), SMALLEST)
        middle = to_bfloat16((high + low) / 2)
        codes = jnp.round((x - middle[..., None]) / scale[..., None] + MIDDLE)
        return jnp.clip(codes, 0, 15).astype(jnp.uint8), scale, middle

    def encode(self, x: jax.Array) -> jax.Array:
        codes, scale, middle = self.quantise(x)
        first, second = jnp.split(codes, 2, axis=-1)
        return jnp.concatenate([first | second << 4, as_bytes(scale), as_bytes(middle)], axis=-1)

    def elements(self, stored: jax.Array) -> Elements:
        packed = stored[..., :-4]
        codes = jnp.concatenate([packed & 15, packed >> 4], axis=-1)
        values = codes.astype(self.dtype) - jnp.asarray(MIDDLE, self.dtype)
        return Elements(values, of_bytes(stored[..., -4:-2]), of_bytes(stored[..., -2:]))
