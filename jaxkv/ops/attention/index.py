"""Chooses the keys that a token attends to, where a model does not attend to all of them.

Keys are chosen in groups of `pool` neighbouring tokens, counted from a multiple of it, which
divides the blocks that are read at once (families refuse others): the last axis of scores, C,
counts groups. Tokens of a group that cannot be chosen (-inf) are chosen: those
of them that a query sees it has no score for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxkv.ops.layers import rms_norm
from jaxkv.ops.rotation import Rotation, apply_rope, rope_tables
from jaxkv.pytree import pytree, static

Change = Callable[[jax.Array], jax.Array]


@pytree
class PoolKeys:
    """Makes the key of a pool of tokens of the mean of theirs: normed, and rotated as the first of
    these tokens is.

    scale_H: of the norm. inv_freq_P, factor: as `ops.rotation.rope_tables` takes them.
    """

    scale_H: jax.Array
    inv_freq_P: jax.Array
    eps: float = static()
    factor: float = static()
    interleaved: bool = static()

    def __call__(self, key_RCPH: jax.Array, position_RC: jax.Array) -> jax.Array:
        mean_XH = key_RCPH.mean(axis=2).reshape(-1, key_RCPH.shape[3])
        key_X1H = rms_norm(mean_XH, self.scale_H, eps=self.eps)[:, None]
        tables = rope_tables(position_RC.ravel(), self.inv_freq_P, self.factor)
        key_X1H = apply_rope(key_X1H, Rotation(*tables, self.interleaved))
        return key_X1H.reshape(*key_RCPH.shape[:2], -1)


@pytree
class Index:
    """Chooses keys: each token attends to the `num_chosen` of the largest scores, which are sums
    over index heads of weight * max(query . key, 0). Keys are the last H numbers of rows, or the
    vector behind a page's keys.

    q_TIH, weight_TI: by index head, float32. pool: so many tokens are chosen together, by one key
    that `pool_keys` makes of theirs; None: rows end with 2H numbers, a key and what each of its
    numbers counts there before a softmax over the pool. Tokens of a pool that a query does not see
    to its end are chosen. Sources: DeepSeek-V3.2, arXiv 2512.02556, equation 1; with pools
    zai-org/GLM-5.3-Flash and Qwen4-Exp, as transformers has them.
    """

    q_TIH: jax.Array
    weight_TI: jax.Array
    num_chosen: int = static()
    pool: int = static(default=1)
    pool_keys: PoolKeys | None = None

    @property
    def num_tokens(self) -> int:
        return self.q_TIH.shape[0]

    @property
    def key_dim(self) -> int:
        """Counts the numbers at the end of a row that it is chosen by."""
        has_counts = self.pool > 1 and self.pool_keys is None
        return self.q_TIH.shape[2] * (2 if has_counts else 1)

    @property
    def num_groups(self) -> int:
        """Counts the KV heads that choose for themselves."""
        return 1

    def with_tokens(self, change: Change) -> Index:
        """Returns it with other tokens, which `change` makes of arrays [T, ..]."""
        return replace(self, q_TIH=change(self.q_TIH), weight_TI=change(self.weight_TI))

    def scores(
        self,
        key_RJX: jax.Array,
        seen_RTJ: jax.Array,
        position_RT: jax.Array,
        key_position_RJ: jax.Array,
    ) -> jax.Array:
        """Scores the keys of R rows for their T tokens each, [R, T, 1, C]; -inf for what a token
        cannot choose. J tokens of a row are whole pools.
        """
        key_RCH = self._keys_of(key_RJX, key_position_RJ)
        q_RTIH, weight_RTI = (
            x.reshape(*seen_RTJ.shape[:2], *x.shape[1:]) for x in (self.q_TIH, self.weight_TI)
        )
        exact = jax.lax.Precision.HIGHEST
        met_RTIC = jnp.einsum("rtih,rch->rtic", q_RTIH, key_RCH, precision=exact)
        score_RTC = jnp.einsum("rti,rtic->rtc", weight_RTI, jax.nn.relu(met_RTIC), precision=exact)
        can_RTC = seen_RTJ[..., self.pool - 1 :: self.pool]
        return jnp.where(can_RTC, score_RTC, -jnp.inf)[:, :, None]

    def _keys_of(self, key_RJX: jax.Array, position_RJ: jax.Array) -> jax.Array:
        """Returns what is scored, [R, C, H], of what is stored of tokens at these positions."""
        key_RCPX = key_RJX.reshape(key_RJX.shape[0], -1, self.pool, key_RJX.shape[2])
        if self.pool_keys is not None:
            return self.pool_keys(key_RCPX, position_RJ[:, :: self.pool])
        if self.pool == 1:
            return key_RJX
        key_RCPH, weight_RCPH = jnp.split(key_RCPX.astype(jnp.float32), 2, axis=-1)
        return (key_RCPH * jax.nn.softmax(weight_RCPH, axis=2)).sum(axis=2)

    def choose(self, score: jax.Array) -> jax.Array:
        """Returns which are chosen of [.., C]."""
        return _largest(score, self.num_chosen // self.pool)


@pytree
class BlockIndex:
    """Chooses blocks of `pool` keys: the tokens' query heads that share a KV head attend to the
    `num_chosen` blocks that have the largest scores, query . key, among them always the
    `num_local` last ones that the token sees. Keys are the vector behind a page's keys.

    q_TKH: by KV head, float32. Source: MiniMaxAI/MiniMax-M3, as transformers has it.
    """

    q_TKH: jax.Array
    num_chosen: int = static()
    num_local: int = static()
    pool: int = static()

    @property
    def num_tokens(self) -> int:
        return self.q_TKH.shape[0]

    @property
    def key_dim(self) -> int:
        """Counts the numbers of a key that blocks are chosen by."""
        return self.q_TKH.shape[2]

    @property
    def num_groups(self) -> int:
        """Counts the KV heads that choose for themselves."""
        return self.q_TKH.shape[1]

    def with_tokens(self, change: Change) -> BlockIndex:
        """Returns it with other tokens, as `Index` does."""
        return replace(self, q_TKH=change(self.q_TKH))

    def scores(
        self,
        key_RJX: jax.Array,
        seen_RTJ: jax.Array,
        position_RT: jax.Array,
        key_position_RJ: jax.Array,
    ) -> jax.Array:
        """Scores blocks as `Index.scores` does keys, for each KV head: [R, T, K, C]."""
        q_RTKH = self.q_TKH.reshape(*seen_RTJ.shape[:2], *self.q_TKH.shape[1:])
        exact = jax.lax.Precision.HIGHEST
        met_RTKJ = jnp.einsum("rtkh,rjh->rtkj", q_RTKH, key_RJX, precision=exact)
        met_RTKJ = jnp.where(seen_RTJ[:, :, None], met_RTKJ, -jnp.inf)
        score_RTKC = met_RTKJ.reshape(*met_RTKJ.shape[:3], -1, self.pool).max(axis=4)
        own_RT = position_RT // self.pool
        back_RTC = own_RT[..., None] - (key_position_RJ[:, :: self.pool] // self.pool)[:, None]
        is_local_RTC = (back_RTC >= 0) & (back_RTC < self.num_local)
        can = ~jnp.isneginf(score_RTKC)
        return jnp.where(is_local_RTC[:, :, None] & can, jnp.inf, score_RTKC)

    def choose(self, score: jax.Array) -> jax.Array:
        """Returns which are chosen of [.., C]."""
        return _largest(score, self.num_chosen)

    def best(self, score: jax.Array) -> jax.Array:
        """Returns the numbers of the chosen of [.., C], which are more, in order; where fewer can
        be chosen, those come first.
        """
        _, best = jax.lax.top_k(score, self.num_chosen)
        return jnp.sort(best, axis=-1)


class EntryShape(NamedTuple):
    """Says of how many tokens an entry is, and of how many numbers. It lies across the ends of its
    tokens' rows.
    """

    rate: int
    size: int

    @property
    def width(self) -> int:
        """Counts its numbers in a row."""
        return -(-self.size // self.rate)


@pytree
class Entries:
    """Says how tokens attend where older ones are compressed: to the last `window` tokens, and to
    entries of so many tokens each as `shape` says, those that end at or before them, or the ones
    that `index` chooses of these; None: there are no entries.

    entry_EX: the entries that a step completes, key and value at once, behind them what they are
    chosen by. last_E int32: the last token of each, past the step's tokens for none. Source:
    DeepSeek-V4's paper, section 2.3.
    """

    entry_EX: jax.Array | None
    last_E: jax.Array | None
    index: Index | None
    window: int = static()
    shape: EntryShape | None = static()


Choice = Index | BlockIndex
AnyIndex = Choice | Entries


def _largest(score: jax.Array, num_chosen: int) -> jax.Array:
    """Returns where the largest are of [.., C], bool; among them those that are -inf, and all where
    there are no more.
    """
    if score.shape[-1] <= num_chosen:
        return jnp.ones(score.shape, bool)
    flat = score.reshape(-1, score.shape[-1])
    _, best = jax.lax.top_k(flat, num_chosen)
    chosen = jnp.isneginf(flat).at[jnp.arange(flat.shape[0])[:, None], best].set(True)
    return chosen.reshape(score.shape)
