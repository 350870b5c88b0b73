"""TurboQuant: rotated vectors by their length and, per coordinate, the nearest of a few fixed
numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.kv.codecs import parts
from jaxkv.kv.codecs.base import Elements, RotatingCodec
from jaxkv.kv.codecs.parts import (
    SMALLEST,
    as_bytes,
    lloyd_max,
    of_bytes,
    pack_bits,
    square_sum,
    to_bfloat16,
    unpack_bits,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class TurboQuantCodec(RotatingCodec):
    """A rotated vector of length r has coordinates of about N(0, r^2 / H), whatever it was: each is
    stored as the index of the nearest Lloyd-Max centroid, r as a bfloat16, corrected so that what
    is stored has the length of the vector.

    num_bits per coordinate, each for an equal share of them: (4,), (3,), or (3, 2) for 2.5 bits
    (after the rotation no channel is an outlier, so any share will do). dtype: in which matmuls
    take the centroids, bfloat16 or float32.
    Source: TurboQuant, arXiv 2504.19874, algorithm 1.
    """

    num_bits: tuple[int, ...]
    dtype: str

    @property
    def name(self) -> str:
        return f"turboquant{float(Fraction(sum(self.num_bits), len(self.num_bits))):g}"

    def width(self, head_dim: int) -> int:
        if head_dim % (8 * len(self.num_bits)):
            raise ValueError(
                f"kv_cache_dtype: {self.name} expects a head_dim that is a multiple of "
                f"{8 * len(self.num_bits)}, got {head_dim}"
            )
        return head_dim // (8 * len(self.num_bits)) * sum(self.num_bits) + 2

    def encode(self, x: jax.Array) -> jax.Array:
        x = parts.rotate(x.astype(jnp.float32))
        length = jnp.sqrt(square_sum(x))
        unit = x * (x.shape[-1] ** 0.5 / jnp.maximum(length, SMALLEST))[..., None]
        packed, found = [], []
        for part, bits in zip(
            jnp.split(unit, len(self.num_bits), axis=-1), self.num_bits, strict=True
        ):
            centroids, borders = lloyd_max(bits)
            codes = jnp.zeros(part.shape, jnp.uint8)
            for border in borders:
                codes += part > border
            packed.append(pack_bits(codes, bits))
            found.append(_chosen(codes, centroids))
        scale = length / jnp.sqrt(square_sum(jnp.concatenate(found, axis=-1)))
        return jnp.concatenate([*packed, as_bytes(to_bfloat16(scale))], axis=-1)

    def elements(self, stored: jax.Array) -> Elements:
        share = (stored.shape[-1] - 2) // sum(self.num_bits)
        borders = np.cumsum([share * bits for bits in self.num_bits])[:-1].tolist()
        pieces = jnp.split(stored[..., :-2], borders, axis=-1)
        values = [
            _chosen(unpack_bits(piece, bits), lloyd_max(bits)[0])
            for piece, bits in zip(pieces, self.num_bits, strict=True)
        ]
        return Elements(
            jnp.concatenate(values, axis=-1).astype(self.dtype), of_bytes(stored[..., -2:])
        )


def _chosen(codes: jax.Array, centroids: np.ndarray) -> jax.Array:
    """Selects the centroids of these codes by halves: processors do so faster than look up."""
    if len(centroids) == 1:
        return jnp.full(codes.shape, centroids[0], jnp.float32)
    half = len(centroids) // 2
    upper = (codes & half) != 0
    return jnp.where(upper, _chosen(codes, centroids[half:]), _chosen(codes, centroids[:half]))
