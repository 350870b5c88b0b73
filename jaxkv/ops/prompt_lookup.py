"""Proposes the next tokens of each row as they came behind an earlier occurrence of its last ones.

Source: prompt lookup decoding (A. Saxena, 2023), after arXiv 2304.04487.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxkv.ops.logits import NO_TOKEN


def look_up(
    text_BN: jax.Array, len_B: jax.Array, *, num_tokens: int, longest: int, shortest: int
) -> jax.Array:
    """Returns the tokens that may follow the first len_B of each row's text, [B, num_tokens] int32;
    NO_TOKEN for a row whose last `shortest` tokens have not come before.

    Of all places before the end it takes the one that most tokens, `longest` at most, precede as
    they precede the end, and of those the latest. Where what follows there reaches the end, it goes
    on with what it proposes itself. Cost: compares B x N x longest tokens.
    """
    last_index = text_BN.shape[1] - 1
    place_BN = jax.lax.broadcasted_iota(jnp.int32, text_BN.shape, 1)
    alike_BN, num_alike_BN = jnp.ones(text_BN.shape, bool), jnp.zeros(text_BN.shape, jnp.int32)
    for back in range(1, longest + 1):
        own_B1 = jnp.take_along_axis(text_BN, jnp.maximum(len_B - back, 0)[:, None], axis=1)
        # Places are to be behind at least so many tokens: what is rolled round is not before them.
        alike_BN &= (jnp.roll(text_BN, back, axis=1) == own_B1) & (place_BN >= back)
        num_alike_BN += alike_BN
    num_alike_BN = jnp.where(place_BN < len_B[:, None], num_alike_BN, 0)
    most_B1 = jnp.max(num_alike_BN, axis=1, keepdims=True)
    best_B = jnp.max(jnp.where(num_alike_BN == most_B1, place_BN, 0), axis=1)
    # A place before the end, so that the text from there on is at least one token long.
    best_B = jnp.minimum(best_B, jnp.maximum(len_B - 1, 0))
    ahead_1k = jnp.arange(num_tokens, dtype=jnp.int32)[None]
    from_Bk = best_B[:, None] + ahead_1k % jnp.maximum(len_B - best_B, 1)[:, None]
    found_Bk = jnp.take_along_axis(text_BN, jnp.minimum(from_Bk, last_index), axis=1)
    return jnp.where(most_B1 >= shortest, found_Bk, NO_TOKEN)
