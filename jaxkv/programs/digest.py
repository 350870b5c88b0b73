"""The program that tells weights apart without taking them off their devices."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


@jax.jit
def digests(arrays: list[jax.Array]) -> list[jax.Array]:
    """Returns some numbers for each array, uint32, which are others if any of its values is: one
    that differs always shows, several do but for one case in 2^32. Values of float32 count as
    bfloat16.

    All axes but the first ones are added up, in whole numbers: so neither the order of a sum nor
    the number of devices matters.
    """
    return [_added_up(_added_up(_bits(x))) for x in arrays]


def _bits(x: jax.Array) -> jax.Array:
    """Returns an array's values as whole numbers [.., 1, D]."""
    whole: Any = jnp.uint32
    if x.dtype == jnp.float32:
        # By their bits, rounded to even: conversions may take the smallest numbers for zeros.
        bits = jax.lax.bitcast_convert_type(x, whole)
        bits = (bits + (bits >> 16 & 1) + 0x7FFF) >> 16
    elif jnp.issubdtype(x.dtype, jnp.floating):
        bits = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
    else:
        bits = x
    return jnp.atleast_2d(bits).astype(whole)


def _added_up(x: jax.Array) -> jax.Array:
    """Adds up the last axis, each place times an odd number of its own."""
    place = jnp.arange(x.shape[-1], dtype=jnp.uint32)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        place = (place ^ place >> shift) * jnp.uint32(factor)
    own = jnp.broadcast_to(2 * place + 1, x.shape)
    return jnp.sum(x * own, axis=-1, dtype=jnp.uint32)
