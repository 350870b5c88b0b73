"""Linear attention: a state is a matrix per head, to which each token adds a product of its key and
value, after decay, and of which its query reads. Gated DeltaNet, Kimi delta attention, Mamba2 and
lightning attention differ in what decays and in what is added.

Here J is key heads, M value heads of each, X the dimension of keys and queries and Y that of
values; a state is [J, M, X, Y] or [J * M, X, Y].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxkv.axes import Array
from jaxkv.ops.recurrent.base import einsum

BLOCK, CHANNEL_BLOCK = 64, 16
"""Tokens of a block where a head decays as one, and where each of its channels does: there a block
needs a number for each pair of its tokens and channel.
"""


class Tokens(NamedTuple):
    """Holds what tokens do to the state, all float32.

    q, k [T, J, X]; v [T, J * M, Y]; decay, the logarithm of what is left of the state (0 at most),
    of each head [T, J * M] or channel [T, J * M, X]; beta [T, J * M], how far the delta rule moves
    what a key finds towards the value: None adds key and value as they are.
    """

    q: Array
    k: Array
    v: Array
    decay: Array
    beta: Array | None = None


@dataclass(frozen=True)
class LinearAttention:
    """Computes S = exp(decay) S + k d^T and y = S^T q for each token, where d is v, or with the
    delta rule beta (v - (exp(decay) S)^T k).

    A block of tokens is computed at once: with D_ts the sum of decays after s up to t, d solves a
    triangular system of products of keys, d_t + beta_t sum_{s<t} exp(D_ts) (k_t . k_s) d_s =
    beta_t (v_t - exp(D_t) S^T k_t), and then y and the next S are plain sums. Exponents are never
    above 0, so nothing overflows. Sources: Gated DeltaNet, arXiv 2412.06464,
    section 3.3; Kimi Linear, arXiv 2510.26692, section 3; Mamba2, arXiv 2405.21060, section 6.

    by_channel: every channel of a key has a decay of its own.
    """

    by_channel: bool = False

    @property
    def block_len(self) -> int:
        return CHANNEL_BLOCK if self.by_channel else BLOCK

    def step(self, state_R: Array, tokens: Tokens) -> tuple[Array, Array]:
        num_key_heads = tokens.k.shape[1]
        q, k = tokens.q[:, :, None, :, None], tokens.k[:, :, None, :, None]
        v, decay = (_by_key(x, num_key_heads) for x in (tokens.v, tokens.decay))
        state = state_R.reshape(len(state_R), num_key_heads, -1, *state_R.shape[-2:])
        state *= jnp.exp(decay)[..., None] if self.by_channel else jnp.exp(decay)[..., None, None]
        if tokens.beta is not None:
            beta = _by_key(tokens.beta, num_key_heads)[..., None]
            v = beta * (v - (state * k).sum(axis=3))
        state += k * v[:, :, :, None, :]
        y = (state * q).sum(axis=3)
        return state.reshape(state_R.shape), y.reshape(tokens.v.shape)

    def block(self, state: Array, tokens: Tokens) -> tuple[Array, Array]:
        num_key_heads = tokens.k.shape[1]
        before_JMXY = state.reshape(num_key_heads, -1, *state.shape[-2:])
        added_CJMY, decay_CJM = (_by_key(x, num_key_heads) for x in (tokens.v, tokens.decay))
        left_CJM, kept_CCJM = jnp.exp(jnp.cumsum(decay_CJM, axis=0)), _kept(decay_CJM)
        if tokens.beta is not None:
            beta_CJM = _by_key(tokens.beta, num_key_heads)
            found_CJMY = self._read(tokens.k, left_CJM, before_JMXY)
            goal_CJMY = beta_CJM[..., None] * (added_CJMY - found_CJMY)
            of_keys_JMCC = self._products(tokens.k, tokens.k, kept_CCJM)
            added_CJMY = jax.lax.linalg.triangular_solve(
                of_keys_JMCC * beta_CJM.transpose(1, 2, 0)[..., None],
                goal_CJMY.transpose(1, 2, 0, 3),
                left_side=True,
                lower=True,
                unit_diagonal=True,
            ).transpose(2, 0, 1, 3)
        seen_JMCC = self._products(tokens.q, tokens.k, kept_CCJM)
        y_CJMY = einsum("jmts,sjmy->tjmy", seen_JMCC, added_CJMY)
        y_CJMY += self._read(tokens.q, left_CJM, before_JMXY)
        if self.by_channel:
            after_JMXY = before_JMXY * left_CJM[-1][..., None]
            k_CJMX = tokens.k[:, :, None] * kept_CCJM[-1]
            after_JMXY += einsum("sjmx,sjmy->jmxy", k_CJMX, added_CJMY)
        else:
            after_JMXY = before_JMXY * left_CJM[-1][..., None, None]
            after_JMXY += einsum("sjx,sjmy->jmxy", tokens.k, added_CJMY * kept_CCJM[-1][..., None])
        return after_JMXY.reshape(state.shape), y_CJMY.reshape(tokens.v.shape)

    def _products(self, a_CJX: Array, k_CJX: Array, kept_CCJM: Array) -> Array:
        """Computes what each token finds of each key, after decay, [J, M, C, C]."""
        if self.by_channel:
            both_CCJX = a_CJX[:, None] * k_CJX[None]
            return (both_CCJX[:, :, :, None] * kept_CCJM).sum(axis=4).transpose(2, 3, 0, 1)
        found_JCC = einsum("tjx,sjx->jts", a_CJX, k_CJX)
        return found_JCC[:, None] * kept_CCJM.transpose(2, 3, 0, 1)

    def _read(self, a_CJX: Array, left_CJM: Array, state_JMXY: Array) -> Array:
        """Computes what each token reads of the state before the block, [C, J, M, Y]."""
        if self.by_channel:
            return einsum("tjmx,jmxy->tjmy", a_CJX[:, :, None] * left_CJM, state_JMXY)
        return einsum("tjx,jmxy->tjmy", a_CJX, state_JMXY) * left_CJM[..., None]


def _kept(decay_C: Array) -> Array:
    """Computes how much of what token s has added is left at token t, [C, C, ...], 0 where s comes
    later. Decays between the two are added up: a difference of sums from the first on would lose
    what is small beside them.
    """
    order = jnp.arange(decay_C.shape[0])
    later_CC = (order[:, None] > order[None]).reshape(len(order), -1, *[1] * (decay_C.ndim - 1))
    between_CC = jnp.cumsum(jnp.where(later_CC, decay_C[:, None], 0), axis=0)
    is_seen_CC = later_CC | (order[:, None] == order[None]).reshape(later_CC.shape)
    return jnp.exp(jnp.where(is_seen_CC, between_CC, -jnp.inf))


def _by_key(x: Array, num_key_heads: int) -> Array:
    """Splits the value heads of each token into those of each key head."""
    return x.reshape(len(x), num_key_heads, -1, *x.shape[2:])
