"""Hashes n-grams of token ids to rows of tables, as 64-bit integers do it, which JAX has none of
here: numbers are four limbs of 16 bits, in uint32.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from jaxkv.axes import Array

LIMB, NUM_LIMBS = 16, 4
MASK = np.uint32(2**LIMB - 1)

Limbs = tuple[Array, ...]
"""A number from 0 to 2**64 - 1, its lowest bits first."""


def table_rows(token_TN: Array, multipliers: Sequence[int], table_sizes: Sequence[int]) -> Array:
    """Returns the rows of tokens and those before them, the last first, in tables that lie one
    behind the other, [T, M].

    The first tables are of two tokens, the next of three, and so on. A row is what the XOR of each
    token times its multiplier leaves when it is divided by the number of rows, less than 2**31.
    Source: transformers' qwen4_exp.
    """
    token_TN = token_TN.astype(jnp.uint32)
    each = len(table_sizes) // (len(multipliers) - 1)
    mixed, found = _product(token_TN[:, 0], multipliers[0]), []
    for i, multiplier in enumerate(multipliers[1:]):
        product = _product(token_TN[:, i + 1], multiplier)
        mixed = tuple(a ^ b for a, b in zip(mixed, product, strict=True))
        sizes_M = np.array(table_sizes[i * each : (i + 1) * each], np.uint32)
        found.append(_remainder(mixed, sizes_M))
    begin_M = np.cumsum([0, *table_sizes[:-1]]).astype(np.int32)
    return jnp.concatenate(found, axis=1).astype(jnp.int32) + begin_M[None]


def _product(x_T: Array, factor: int) -> Limbs:
    """Multiplies modulo 2**64."""
    sums = [jnp.zeros_like(x_T)] * NUM_LIMBS
    for i, part_T in enumerate((x_T & MASK, x_T >> LIMB)):
        for j in range(NUM_LIMBS - i):
            product_T = part_T * np.uint32(factor >> LIMB * j & int(MASK))
            sums[i + j] += product_T & MASK
            if i + j + 1 < NUM_LIMBS:
                sums[i + j + 1] += product_T >> LIMB
    for i in range(1, NUM_LIMBS):
        sums[i] += sums[i - 1] >> LIMB
    return tuple(x & MASK for x in sums)


def _remainder(x_T: Limbs, divisor_M: np.ndarray) -> Array:
    """Divides by each of some numbers less than 2**31, and returns what is left, [T, M]."""
    spare = 32 - int(divisor_M.max()).bit_length()
    step = 1 << min(spare, LIMB).bit_length() - 1  # bits that are taken at once divide a limb
    left_TM = jnp.zeros((x_T[0].shape[0], len(divisor_M)), jnp.uint32)
    for limb_T in reversed(x_T):
        for shift in range(LIMB - step, -1, -step):
            bits_T = limb_T >> shift & np.uint32(2**step - 1)
            left_TM = (left_TM << step | bits_T[:, None]) % divisor_M[None]
    return left_TM
