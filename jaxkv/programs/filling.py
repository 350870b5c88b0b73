"""Fills arrays of the weight tree with those that a program has on its devices."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.models.families.base import Part


@partial(jax.jit, donate_argnums=(0, 1), static_argnums=(4, 5))
def fill(
    stack: jax.Array,
    is_finite: jax.Array,
    given: jax.Array,
    place: tuple[np.ndarray, ...],
    part: Part | None,
    where: jax.sharding.Sharding,
) -> tuple[jax.Array, jax.Array]:
    """Puts an array, or that part of it, in its place on the stack's first axes. Returns the stack,
    divided as `where` says, and whether what was put there is finite too. Bits of bfloat16 are
    uint16 in both.
    """
    bits, short = jnp.uint16, jnp.bfloat16
    given = jax.lax.bitcast_convert_type(given, short) if given.dtype == bits else given
    piece = given if part is None else part.take(given)
    is_bits = stack.dtype == bits
    piece = piece.astype(short if is_bits else stack.dtype)
    # NaN is no less than infinity; `isfinite` and `all` take three times as long on a CPU.
    is_finite &= jnp.abs(piece).max(initial=0) < jnp.inf
    piece = jax.lax.bitcast_convert_type(piece, bits) if is_bits else piece
    inner = stack.shape[len(place) :]
    piece = piece.reshape((1,) * len(place) + inner)
    starts = (*place, *np.zeros(len(inner), np.int32))
    stack = jax.lax.dynamic_update_slice(stack, piece, starts)
    # Of one layer alone XLA would choose for itself.
    return jax.lax.with_sharding_constraint(stack, where), is_finite
