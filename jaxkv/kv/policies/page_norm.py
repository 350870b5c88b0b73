"""Pages whose values are large and whose keys are small."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.kv.policies.base import Held, Measure, Policy, Room, keep_best


def mean_lengths(k_WKSH: jax.Array, v_WKSH: jax.Array) -> jax.Array:
    """Returns the mean lengths of a page's keys and of its values, over heads and slots, [W, 2]."""
    lengths = (jnp.linalg.norm(x, axis=-1) for x in (k_WKSH, v_WKSH))
    return jnp.stack([jnp.mean(jnp.mean(x, axis=-1), axis=-1) for x in lengths], axis=-1)


@dataclass(frozen=True, kw_only=True, slots=True)
class PageNorm(Policy):
    """Keeps pages by the length of their values over that of their keys, without asking attention.

    Source: PagedEviction, arXiv 2509.04377; that short keys draw attention: arXiv 2406.11430.
    """

    name: str = "page_norm"
    measure: Measure | None = mean_lengths

    def select(self, held: Held, room: Room) -> np.ndarray:
        key_W, value_W = held.measured_W.T
        return keep_best(value_W / np.maximum(key_W, 1e-30), held, room)
