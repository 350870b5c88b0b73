"""Changes logits before a token is drawn: allowed tokens, stop tokens out of reach, bias,
penalties; all per row.

Each function is [B, V] float32 -> [B, V]. Token ids that are NO_TOKEN (below 0) stand for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

NO_TOKEN = -1
FINITE = 1e30
"""As large as penalties make a logit at most: still finite when it is divided by a temperature."""


def allow(logits_BV: jax.Array, masked_B: jax.Array, allowed_BM: jax.Array) -> jax.Array:
    """Sets -inf, in masked rows, for every token whose bit (token % 32 of word token // 32) is not
    set.
    """
    vocab_size = logits_BV.shape[1]
    word_BV = jnp.repeat(allowed_BM, 32, axis=1)[:, :vocab_size]
    bit_1V = jax.lax.broadcasted_iota(jnp.uint32, (1, vocab_size), 1) % 32
    allowed_BV = (word_BV >> bit_1V) & 1 == 1
    return jnp.where(allowed_BV | ~masked_B[:, None], logits_BV, -jnp.inf)


def forbid(logits_BV: jax.Array, token_BE: jax.Array) -> jax.Array:
    """Sets -inf for the given tokens."""
    return logits_BV.at[_places(token_BE, logits_BV)].set(-jnp.inf, mode="drop")


def add_bias(logits_BV: jax.Array, token_BE: jax.Array, bias_BE: jax.Array) -> jax.Array:
    """Adds to each of the given tokens its bias; no token comes twice in a row."""
    return logits_BV.at[_places(token_BE, logits_BV)].add(bias_BE, mode="drop")


def penalise(
    logits_BV: jax.Array,
    seen: Sequence[jax.Array],
    generated: Sequence[jax.Array],
    *,
    repetition_B: jax.Array,
    frequency_B: jax.Array,
    presence_B: jax.Array,
) -> jax.Array:
    """Penalises repetition over the `seen` tokens (prompt and output), then frequency and presence
    over the `generated` ones.

    Both are lists of [B, any] int32. A token that comes often is divided, multiplied or marked
    once, because every occurrence writes the same value; frequency is subtracted for each.
    Parameters 1, 0, 0 change no bit.
    Cost: a gather and a scatter per token, no [B, V] counts.
    """
    before_BV = logits_BV
    for token_BN in seen:
        logit_BN = _gather(before_BV, token_BN)
        factor_B1 = repetition_B[:, None]
        less_BN = jnp.where(logit_BN > 0, logit_BN / factor_B1, logit_BN * factor_B1)
        # Where all allowed tokens have come, -inf would make them as unlikely as the others.
        less_BN = jnp.where(jnp.isinf(logit_BN), logit_BN, jnp.clip(less_BN, -FINITE, FINITE))
        logits_BV = logits_BV.at[_places(token_BN, logits_BV)].set(less_BN, mode="drop")
    for token_BN in generated:
        once_BN = jnp.broadcast_to(-frequency_B[:, None], token_BN.shape)
        logits_BV = logits_BV.at[_places(token_BN, logits_BV)].add(once_BN, mode="drop")
    before_BV = logits_BV
    for token_BN in generated:
        less_BN = _gather(before_BV, token_BN) - presence_B[:, None]
        logits_BV = logits_BV.at[_places(token_BN, logits_BV)].set(less_BN, mode="drop")
    return logits_BV


def _places(token_BN: jax.Array, logits_BV: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns row and column of each token; NO_TOKEN lies past the end, since -1 would be the last
    one.
    """
    row_B1 = jnp.arange(token_BN.shape[0])[:, None]
    return row_B1, jnp.where(token_BN < 0, logits_BV.shape[1], token_BN)


def _gather(logits_BV: jax.Array, token_BN: jax.Array) -> jax.Array:
    return logits_BV.at[_places(token_BN, logits_BV)].get(mode="clip")
