"""Rules whose state decays and grows number by number: no number of it meets another one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from jaxkv.axes import Array
from jaxkv.ops.layers import rounded, total_over
from jaxkv.ops.recurrent.base import einsum

BLOCK = 32


def _advance(state: Array, decay_C: Array, gain_C: Array) -> Array:
    """Returns the states after each of the tokens, [C, ...]: h = exp(decay) h + gain."""

    def both(first: tuple[Array, Array], second: tuple[Array, Array]) -> tuple[Array, Array]:
        return first[0] * second[0], second[0] * first[1] + second[1]

    left_C, gained_C = jax.lax.associative_scan(both, (jnp.exp(decay_C), gain_C))
    return left_C * state[None] + gained_C


class Gains(NamedTuple):
    """Holds the logarithm of what is left of each number of the state (0 at most), and what joins
    it, [T, X].
    """

    decay: Array
    gain: Array


@dataclass(frozen=True)
class Diagonal:
    """Computes h = exp(decay) h + gain and y = h: the RG-LRU. A state is [X]. Source: arXiv
    2402.19427, section 2.4.
    """

    block_len: ClassVar[int] = BLOCK

    def step(self, state_R: Array, tokens: Gains) -> tuple[Array, Array]:
        state_R = jnp.exp(tokens.decay) * state_R + rounded(tokens.gain)
        return state_R, state_R

    def block(self, state: Array, tokens: Gains) -> tuple[Array, Array]:
        state_C = _advance(state, tokens.decay, tokens.gain)
        return state_C[-1], state_C


class Selected(NamedTuple):
    """Holds a step size and a value per channel [T, X], and what the token writes to and reads of
    the N numbers of each channel, b and c [T, N], or [T, J, N] for J equal parts of the channels.
    """

    delta: Array
    x: Array
    b: Array
    c: Array


@dataclass(frozen=True)
class Selective:
    """Computes h = exp(delta a) h + delta x b and y = h . c for each channel: the selective scan of
    Mamba. A state is [X, N]. Source: arXiv 2312.00752, section 3.

    a_XN: below 0.
    """

    block_len: ClassVar[int] = BLOCK
    a_XN: Array

    def _gains(self, tokens: Selected) -> tuple[Array, Array]:
        decay = rounded(tokens.delta[:, :, None] * self.a_XN[None])
        return decay, (tokens.delta * tokens.x)[:, :, None] * self._of_channels(tokens.b)

    def step(self, state_R: Array, tokens: Selected) -> tuple[Array, Array]:
        decay, gain = self._gains(tokens)
        # Not computed again for y, where XLA:CPU may round it otherwise than what is stored.
        state_R = jax.lax.optimization_barrier(jnp.exp(decay) * state_R + rounded(gain))
        return state_R, total_over(rounded(state_R * self._of_channels(tokens.c)), 2)

    def block(self, state: Array, tokens: Selected) -> tuple[Array, Array]:
        state_C = _advance(state, *self._gains(tokens))
        if tokens.c.ndim == 3:
            return state_C[-1], einsum("txn,txn->tx", state_C, self._of_channels(tokens.c))
        return state_C[-1], einsum("txn,tn->tx", state_C, tokens.c)

    def _of_channels(self, y: Array) -> Array:
        """Returns what is for all channels, or for each part of them, as [T, 1 or X, N]."""
        if y.ndim == 2:
            return y[:, None, :]
        return jnp.repeat(y, self.a_XN.shape[0] // y.shape[1], axis=1)
