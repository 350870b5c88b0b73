"""The program that writes an adapter to the device: whichever comes, nothing is compiled for it."""

from __future__ import annotations

from functools import partial

import jax

from jaxkv.placement import Placement
from jaxkv.weights.tree import Weights


@partial(jax.jit, static_argnames=("placement",), donate_argnames=("adapters",))
def write_adapter(
    adapters: Weights, own: Weights, slot: jax.Array, *, placement: Placement | None = None
) -> Weights:
    """Replaces the adapter in a slot of all adapters on the device (`weights.adapters`). Consumes
    `adapters`.
    """

    def write(path: tuple, leaf: jax.Array, new: jax.Array) -> jax.Array:
        leaf = jax.lax.dynamic_update_index_in_dim(leaf, new, slot, 1)
        if placement is None or placement.size == 1:
            return leaf
        parts = placement.weight(".".join(one.key for one in path), leaf.shape)
        return jax.lax.with_sharding_constraint(leaf, placement.sharding(parts))

    return jax.tree_util.tree_map_with_path(write, adapters, own)
