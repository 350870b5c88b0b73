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
from jaxkv.ops.layers import rounded, total_over
from jaxkv.ops.recurrent.base import einsum

BLOCK, CHANNEL_BLOCK = 64, 16
"""Tokens of a block where a head decays as one, and where each of its channels does: there a block
needs a number for each pair of its tokens and channel.
"""

LARGE = 64 * 64
"""Numbers of a head's state from which a CPU reads it by XLA's own sums (jax 0.12, heads that decay
as one) or matmuls, which have the same bits for any number of rows then and take both cores.
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
        left = jnp.exp(decay)[..., None] if self.by_channel else jnp.exp(decay)[..., None, None]
        if tokens.beta is not None:
            beta = _by_key(tokens.beta, num_key_heads)[..., None]
            v = beta * (v - self._met(state, left * k))
        state = rounded(state * left) + rounded(k * v[:, :, :, None, :])
        y = self._met(state, q)
        return state.reshape(state_R.shape), y.reshape(tokens.v.shape)

    def _met(self, state: Array, x: Array) -> Array:
        """Computes what queries or keys [R, J, 1, X, 1] find in states [R, J, M, X, Y]."""
        cpu = _met_in_order
        if state.shape[-2] * state.shape[-1] >= LARGE:
            sums_alike = not self.by_channel and jax.__version_info__ >= (0, 11)
            cpu = _met_at_once if sums_alike else _met_by_head
        return jax.lax.platform_dependent(state, x, cpu=cpu, default=_met_at_once)

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
            system_JMCC = of_keys_JMCC * beta_CJM.transpose(1, 2, 0)[..., None]
            added_CJMY = einsum("jmts,sjmy->tjmy", inverse_of_lower(system_JMCC), goal_CJMY)
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


def inverse_of_lower(a_CC: Array) -> Array:
    """Inverts matrices [..., C, C] whose diagonal counts as 1 and what is above it as 0; C is a
    power of two.

    Of two blocks on the diagonal that are inverted, P and Q, and R below P, the inverse of the
    whole is [[P, 0], [-Q R P, Q]]: log2(C) times two small products of all blocks at once. XLA's
    triangular solve calls LAPACK on a CPU: for 32 heads of 64 tokens and 128 values 299 ms of CPU
    time on a busy machine of two cores, where this and the product take 3.
    """
    size, batch = a_CC.shape[-1], a_CC.shape[:-2]
    found = jnp.ones((*batch, size, 1, 1), a_CC.dtype)
    width = 1
    while width < size:
        pairs, pair = found.reshape(*batch, -1, 2, width, width), jnp.arange(size // (2 * width))
        first, second = pairs[..., 0, :, :], pairs[..., 1, :, :]
        blocks = a_CC.reshape(*batch, len(pair), 2, width, len(pair), 2, width)
        below = jnp.moveaxis(blocks[..., 1, :, :, 0, :], -2, -3)[..., pair, pair, :, :]
        below = -einsum("...ij,...jk,...kl->...il", second, below, first)
        upper = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
        lower = jnp.concatenate([below, second], axis=-1)
        found, width = jnp.concatenate([upper, lower], axis=-2), 2 * width
    return found.reshape(a_CC.shape)


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


def _met_at_once(state: Array, x: Array) -> Array:
    return (state * x).sum(axis=3)


def _met_by_head(state: Array, x: Array) -> Array:
    heads = state.shape[:3]
    state_HXY = state.reshape(-1, *state.shape[3:])
    x_H1X = jnp.broadcast_to(x[..., 0], (*heads, state.shape[3])).reshape(len(state_HXY), 1, -1)
    return einsum("hix,hxy->hiy", x_H1X, state_HXY).reshape(*heads, -1)


def _met_in_order(state: Array, x: Array) -> Array:
    """Reads a state that is there: XLA would compute it again for each term."""
    return total_over(rounded(jax.lax.optimization_barrier(state) * x), 3)


def _by_key(x: Array, num_key_heads: int) -> Array:
    """Splits the value heads of each token into those of each key head."""
    return x.reshape(len(x), num_key_heads, -1, *x.shape[2:])
