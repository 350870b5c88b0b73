"""Weights of a model that nobody has trained: for measuring speed and memory without a
checkpoint.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxkv.models.families import Layout
from jaxkv.models.spec import ModelSpec
from jaxkv.placement import Placement
from jaxkv.weights.tree import TreeLeaf, is_stacked, make_tree, tree_leaves


def weight_shapes(
    spec: ModelSpec, layout: Layout, *, dtype: str, placement: Placement
) -> dict[str, Any]:
    """Returns the weight tree that `load_weights` makes, as shapes with their shardings; a head
    that may be tied is.
    """

    def abstract(leaf: TreeLeaf) -> jax.ShapeDtypeStruct:
        parts = placement.weight(leaf.name, len(leaf.shape))
        return placement.abstract(leaf.shape, jnp.dtype(dtype), parts)

    leaves = [leaf for leaf in tree_leaves(spec, layout) if leaf.one.same_as is None]
    return make_tree((leaf, abstract(leaf)) for leaf in leaves)


def random_weights(
    spec: ModelSpec, layout: Layout, *, dtype: str, as_bits: bool, placement: Placement, seed: int
) -> dict[str, Any]:
    """Draws the weight tree of `load_weights` on the first device, so that it takes seconds at any
    size.

    Vectors are 1; matrices are uniform with variance 1 / (their last dimension), which keeps
    activations near 1.
    """

    def draw(number: int, path: Any, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        if len(leaf.shape) - is_stacked(path) == 1:
            x = jnp.ones(leaf.shape, leaf.dtype)
        else:
            key, bound = (
                jax.random.fold_in(jax.random.key(seed, impl="rbg"), number),
                (3 / leaf.shape[-1]) ** 0.5,
            )
            x = jax.random.uniform(key, leaf.shape, leaf.dtype, -bound, bound)
        x = jax.lax.bitcast_convert_type(x, jnp.uint16) if as_bits else x
        return jax.device_put(x, leaf.sharding).block_until_ready()

    shapes = weight_shapes(spec, layout, dtype=dtype, placement=placement)
    leaves, tree = jax.tree_util.tree_flatten_with_path(shapes)
    return jax.tree.unflatten(tree, [draw(number, *leaf) for number, leaf in enumerate(leaves)])
