"""Pages of a pool that have more than one array."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

HEAD_DIMS = (64, 128, 256)


def padded_head_dim(head_dim: int) -> int:
    """Returns the smallest head size that the kernels take and that is at least as large; one that
    is larger than all of them as it is.
    """
    return min((size for size in HEAD_DIMS if size >= head_dim), default=head_dim)


class QuantisedPages(NamedTuple):
    """Holds numbers and, head by head, what makes vectors of them.

    8 bits: numbers [L*P, 2K, S, H] int8 and scales [L*P, 1, 2K * S] bfloat16; x = scale * number.
    4 bits: numbers [L*P, 2K, S, H/2] int8, each 16 times number i + H/2 of a vector and 8 more than
    its number i, all from -8 to 7; scales [L*P, 1, 2K * S] int32, each a bfloat16 scale in the low
    half and an offset in the high one; x = scale * (number + 1/2) + offset.
    """

    numbers: jax.Array
    scales: jax.Array

    @property
    def num_bits(self) -> int:
        return 4 if self.scales.dtype == jnp.int32 else 8


def pack_numbers(numbers: jax.Array) -> jax.Array:
    """Puts numbers [..., H] from -8 to 7 in the bytes [..., H/2] of `QuantisedPages`."""
    first, second = jnp.split(numbers.astype(jnp.int8), 2, axis=-1)
    return second * 16 + (first + 8)


def unpack_numbers(packed: jax.Array) -> jax.Array:
    """Inverts `pack_numbers`."""
    return jnp.concatenate([(packed & 15) - 8, packed >> 4], axis=-1)


def pack_scales(scale: jax.Array, offset: jax.Array) -> jax.Array:
    """Puts scales and offsets [...], each rounded to bfloat16, in the words of `QuantisedPages`."""
    both = jnp.stack([scale, offset], axis=-1).astype(jnp.bfloat16)
    return jax.lax.bitcast_convert_type(both, jnp.int32)


def unpack_scales(words: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Inverts `pack_scales`: (scale, offset), float32. Also used inside of the kernels."""

    def float_of(bits: jax.Array) -> jax.Array:
        return jax.lax.bitcast_convert_type(bits, jnp.float32)

    return float_of(words << 16), float_of(words & jnp.int32(-(1 << 16)))
