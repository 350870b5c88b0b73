"""A softmax in parts: over blocks of keys, over two pools of pages, and what it says about the
pages.

Source: arXiv 2205.14135, section 3.1; the entropy by the same recurrence, log sum - entropy / sum.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxkv.axes import MeshAxes
from jaxkv.kv.state import Statistics

MASKED = -1e30
"""Score of a key that is not seen: finite, so that a block without any seen key does not make
NaN.
"""


class Softmax(NamedTuple):
    """Running softmax over key blocks: max and sum [R, K, M], accumulator [R, K, M, H], float32.

    entropy [R, K, M]: the sum of weight * (score - max), from which the entropy is log sum -
    entropy / sum; None unless asked for.
    """

    max: jax.Array
    sum: jax.Array
    acc: jax.Array
    entropy: jax.Array | None = None

    @classmethod
    def empty(cls, *shape: int, entropy: bool = False) -> Softmax:
        zeros = jnp.zeros(shape, jnp.float32)
        return cls(
            jnp.full(shape[:-1], MASKED, jnp.float32),
            zeros[..., 0],
            zeros,
            zeros[..., 0] if entropy else None,
        )

    def moved(self, top: jax.Array) -> Softmax:
        """Returns it relative to another max, at least as large."""
        shrink = jnp.exp(self.max - top)
        entropy = (
            None if self.entropy is None else shrink * (self.entropy + self.sum * (self.max - top))
        )
        return Softmax(top, self.sum * shrink, self.acc * shrink[..., None], entropy)

    def merged(self, other: Softmax) -> Softmax:
        """Returns the softmax over the keys of both. Source: arXiv 2205.14135, section 3.1."""
        top = jnp.maximum(self.max, other.max)
        mine, its = self.moved(top), other.moved(top)
        entropy = (
            None if mine.entropy is None or its.entropy is None else mine.entropy + its.entropy
        )
        return Softmax(top, mine.sum + its.sum, mine.acc + its.acc, entropy)

    def over(self, axis: MeshAxes) -> Softmax:
        """Returns the softmax over the keys of all devices of a mesh axis, with this device's part
        of the accumulator: results are to be added up. Source: as `merged`.
        """
        mine = self.moved(jax.lax.pmax(self.max, axis))
        entropy = None if mine.entropy is None else jax.lax.psum(mine.entropy, axis)
        return Softmax(mine.max, jax.lax.psum(mine.sum, axis), mine.acc, entropy)

    def result(self) -> jax.Array:
        # A row that saw nothing (padding) has sum 0: it gets zeros instead of NaN.
        return self.acc / jnp.where(self.sum > 0, self.sum, 1.0)[..., None]


class Rows(NamedTuple):
    """The pages of R rows of a store, alike for all KV heads (K = 1) or chosen for each, with the
    positions of their first slots and how many of their slots are held; and those of the store's
    `low`.
    """

    table_RKW: jax.Array
    first_RKW: jax.Array
    held_RKW: jax.Array
    low: Rows | None


class Tally(NamedTuple):
    """Sums of the weights of each page, [R, n * C] for R rows of n blocks of C pages, kept as
    sums_nRKMC relative to tops_nRKM, and how many keys a query has seen, [R, M] or [R, 1].
    """

    sums_nRKMC: jax.Array
    tops_nRKM: jax.Array
    seen_RM: jax.Array

    @classmethod
    def empty(cls, shape_nRKMC: tuple[int, ...], position_RM: jax.Array) -> Tally:
        tops = jnp.full(shape_nRKMC[:-1], MASKED, jnp.float32)
        return cls(
            jnp.zeros(shape_nRKMC, jnp.float32), tops, jnp.zeros(position_RM.shape, jnp.int32)
        )

    def with_block(
        self, i: jax.Array, weight_RKMJ: jax.Array, top_RKM: jax.Array, seen_RMJ: jax.Array
    ) -> Tally:
        """Returns it with the weights of block i relative to `top`, and which of its keys were
        seen.
        """
        put = partial(jax.lax.dynamic_update_index_in_dim, index=i, axis=0)
        sums = weight_RKMJ.reshape(*weight_RKMJ.shape[:3], self.sums_nRKMC.shape[-1], -1).sum(
            axis=-1
        )
        return Tally(
            put(self.sums_nRKMC, sums),
            put(self.tops_nRKM, top_RKM),
            self.seen_RM + seen_RMJ.sum(axis=-1),
        )

    def mass(self, top_RKM: jax.Array, share_RKM: jax.Array) -> jax.Array:
        """Returns the masses [R, W], added up over queries, each counted `share` times relative to
        the max `top`.
        """
        share_nRKM = jnp.exp(self.tops_nRKM - top_RKM[None]) * share_RKM[None]
        exact = jax.lax.Precision.HIGHEST
        mass_RnC = jnp.einsum("nrkmc,nrkm->rnc", self.sums_nRKMC, share_nRKM, precision=exact)
        return mass_RnC.reshape(mass_RnC.shape[0], -1)


class Found(NamedTuple):
    """Holds what the softmaxes of R rows were like: over all their keys, and by page of the store
    and of its `low`.
    """

    softmax: Softmax
    own: Tally
    low: Tally | None

    def counted(self, counts_RM: jax.Array, like: Statistics) -> Statistics:
        """`Statistics` of these rows, of the queries that count."""
        _, total, _, weighted = self.softmax
        is_one = counts_RM[:, None] & (total > 0)
        total = jnp.where(is_one, total, 1)
        share = jnp.where(is_one, 1 / total, 0)
        entropy = (
            None if weighted is None else jnp.where(is_one, jnp.log(total) - weighted * share, 0)
        )
        if like.focused:
            if entropy is None:
                raise TypeError("expected softmaxes with entropies")
            seen_RM = self.own.seen_RM + (0 if self.low is None else self.low.seen_RM)
            share *= jnp.clip(1 - entropy / jnp.log(jnp.maximum(seen_RM, 2))[:, None], 0, 1)
        low_BW = None
        if self.low is not None and like.low_BW is not None:
            low_BW = self.low.mass(self.softmax.max, share)[:, : like.low_BW.shape[1]]
        return Statistics(
            mass_BW=self.own.mass(self.softmax.max, share)[:, : like.mass_BW.shape[1]],
            low_BW=low_BW,
            entropy_B=None if entropy is None else entropy.sum(axis=(1, 2)),
            focused=like.focused,
        )
