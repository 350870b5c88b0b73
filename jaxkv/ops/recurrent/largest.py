"""The rule of a level that falls with time and that tokens lift."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from jaxkv.axes import Array


class Levels(NamedTuple):
    """Holds how far each head's level falls (0 at most) and what it is at least then, [T, M], and 1
    for a token, 0 for none, [T].
    """

    decay: Array
    level: Array
    is_real: Array


@dataclass(frozen=True)
class Largest:
    """Computes m = max(m + decay, level) for each token and head, from 0 on. A state is [M].
    Source: the stabiliser of xLSTM, arXiv 2405.04517, equation 15.
    """

    block_len: ClassVar[int] = 64

    def step(self, state_R: Array, tokens: Levels) -> tuple[Array, Array]:
        after = jnp.maximum(state_R + tokens.decay, tokens.level)
        state_R = jnp.where(tokens.is_real[:, None] > 0, after, state_R)
        return state_R, state_R

    def block(self, state: Array, tokens: Levels) -> tuple[Array, Array]:
        is_real_C1 = tokens.is_real[:, None] > 0
        decay_CM = jnp.where(is_real_C1, tokens.decay, 0)
        level_CM = jnp.where(is_real_C1, tokens.level, -jnp.inf)

        def both(one: tuple[Array, Array], other: tuple[Array, Array]) -> tuple[Array, Array]:
            return one[0] + other[0], jnp.maximum(one[1] + other[0], other[1])

        passed_CM, most_CM = jax.lax.associative_scan(both, (decay_CM, level_CM))
        after_CM = jnp.maximum(state[None] + passed_CM, most_CM)
        return after_CM[-1], after_CM
