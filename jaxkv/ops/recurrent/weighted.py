"""The rule of averages whose weights decay, as RWKV-4 has it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from jaxkv.axes import Array
from jaxkv.ops.layers import rounded

LEAST = -1e38
"""The exponent of a sum without any token."""

Sums = tuple[Array, Array, Array]
"""The sum of weighted values and that of weights, both over exp of the third."""


class Weighted(NamedTuple):
    """Holds the logarithm of each channel's weight and its value, [T, X], and 1 for a token, 0 for
    none, [T].
    """

    key: Array
    value: Array
    is_real: Array


def _joined(one: Sums, other: Sums) -> Sums:
    """Adds sums up, over the larger of their exponents: no power of e is above 1."""
    most = jnp.maximum(one[2], other[2])
    left, right = jnp.exp(one[2] - most), jnp.exp(other[2] - most)
    value, weight = (left * a + rounded(right * b) for a, b in zip(one[:2], other[:2], strict=True))
    return value, weight, most


@dataclass(frozen=True)
class DecayingAverage:
    """Computes for each channel the average of values, each with the weight exp(key - n * decay) of
    a token n + 1 tokens ago, and exp(key + bonus) of the token itself. A state is [X, 3]. Source:
    RWKV, arXiv 2305.13048, section 3.1.3, equation 16.

    decay_X: above 0.
    """

    block_len: ClassVar[int] = 32
    decay_X: Array
    bonus_X: Array

    def step(self, state_R: Array, tokens: Weighted) -> tuple[Array, Array]:
        value, weight, most = before = _sums_of(state_R)
        own = (tokens.value, jnp.ones_like(tokens.value), tokens.key)
        after = jnp.stack(_joined((value, weight, most - self.decay_X[None]), own), axis=-1)
        state_R = jnp.where(tokens.is_real[:, None, None] > 0, after, state_R)
        return jax.lax.optimization_barrier(state_R), self._average(before, tokens)

    def block(self, state: Array, tokens: Weighted) -> tuple[Array, Array]:
        is_real_C1 = tokens.is_real[:, None] > 0
        decay_CX = jnp.where(is_real_C1, self.decay_X[None], 0)
        weight_CX = jnp.broadcast_to(jnp.where(is_real_C1, 1.0, 0.0), tokens.value.shape)
        own = (tokens.value, weight_CX, jnp.where(is_real_C1, tokens.key, LEAST))

        def both(first: tuple[Array, Sums], second: tuple[Array, Sums]) -> tuple[Array, Sums]:
            (decay, (value, weight, most)), (more, sums) = first, second
            return decay + more, _joined((value, weight, most - more), sums)

        passed_CX, sums = jax.lax.associative_scan(both, (decay_CX, own))
        value, weight, most = (x[None] for x in _sums_of(state))
        after_CX3 = jnp.stack(_joined((value, weight, most - passed_CX), sums), axis=-1)
        before_CX3 = jnp.concatenate([state[None], after_CX3[:-1]])
        return after_CX3[-1], self._average(_sums_of(before_CX3), tokens)

    def _average(self, before: Sums, tokens: Weighted) -> Array:
        """Returns what tokens read of the sums before them and of themselves."""
        own = (tokens.value, jnp.ones_like(tokens.value), tokens.key + self.bonus_X[None])
        value, weight, _ = _joined(before, own)
        return value / weight


def _sums_of(state: Array) -> Sums:
    """Takes a state apart: one of zeros, which a row begins with, is a sum without tokens."""
    value, weight, most = (state[..., i] for i in range(3))
    return value, weight, jnp.where(weight == 0, LEAST, most)
