"""Weights of a model that nobody has trained: for measuring speed and memory without a
checkpoint.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.models.families import Layout
from jaxkv.models.spec import ModelSpec
from jaxkv.placement import Placement
from jaxkv.weights.packing import LARGEST, SCALES, base_name, packing_for
from jaxkv.weights.tree import TreeLeaf, is_matrix, is_stacked, make_tree, tree_leaves


def leaf_arrays(
    leaf: TreeLeaf, *, dtype: str, num_parts: int, quantization: str | None
) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
    """Returns shapes and dtypes of the arrays that a leaf becomes, by what follows its name; those
    that a checkpoint stores quantised are counted as if they were not.
    """
    if quantization is None or not is_matrix(leaf):
        return {"": (leaf.shape, jnp.dtype(dtype))}
    return packing_for(quantization, leaf.shape[-1], num_parts, dtype=dtype).arrays(leaf.shape)


def weight_shapes(
    spec: ModelSpec,
    layout: Layout,
    *,
    dtype: str,
    placement: Placement,
    quantization: str | None = None,
) -> dict[str, Any]:
    """Returns the weight tree that `load_weights` makes, as shapes with their shardings; a head
    that may be tied is, and what a checkpoint stores quantised is not.
    """

    def abstract(leaf: TreeLeaf) -> dict[str, jax.ShapeDtypeStruct]:
        arrays = leaf_arrays(leaf, dtype=dtype, num_parts=placement.size, quantization=quantization)
        return {
            suffix: placement.abstract(shape, kind, placement.weight(leaf.name + suffix, shape))
            for suffix, (shape, kind) in arrays.items()
        }

    leaves = [leaf for leaf in tree_leaves(spec, layout) if leaf.one.same_as is None]
    return make_tree((leaf, abstract(leaf)) for leaf in leaves)


def random_weights(
    spec: ModelSpec,
    layout: Layout,
    *,
    dtype: str,
    as_bits: bool,
    placement: Placement,
    seed: int,
    quantization: str | None = None,
) -> dict[str, Any]:
    """Draws the weight tree of `load_weights` on the first device, so that it takes seconds at any
    size.

    Vectors are 1; matrices are uniform with variance 1 / (their last dimension), which keeps
    activations near 1. Quantised ones are uniform too, with equal scales.
    """

    def draw(number: int, path: Any, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(seed, impl="rbg"), number)
        if path[-1].key.endswith(SCALES):
            values = shapes[path[0].key][base_name(path[-1].key)]
            num_columns, most = values.shape[1] * values.shape[3], LARGEST[values.dtype.name]
            x = jnp.full(leaf.shape, (3 / num_columns) ** 0.5 / most, leaf.dtype)
        elif leaf.dtype.name in LARGEST:
            most = LARGEST[leaf.dtype.name]
            drawn = jax.random.uniform(key, leaf.shape, jnp.bfloat16, -most, most)
            is_float = leaf.dtype.name.startswith("float")
            x = (drawn if is_float else jnp.round(drawn)).astype(leaf.dtype)
        elif len(leaf.shape) - is_stacked(path) == 1:
            x = jnp.ones(leaf.shape, leaf.dtype)
        else:
            bound = (3 / leaf.shape[-1]) ** 0.5
            x = jax.random.uniform(key, leaf.shape, leaf.dtype, -bound, bound)
        x = jax.lax.bitcast_convert_type(x, jnp.uint16) if as_bits and x.dtype == dtype else x
        return jax.device_put(x, leaf.sharding).block_until_ready()

    shapes = weight_shapes(
        spec, layout, dtype=dtype, placement=placement, quantization=quantization
    )
    leaves, tree = jax.tree_util.tree_flatten_with_path(shapes)
    return jax.tree.unflatten(tree, [draw(number, *leaf) for number, leaf in enumerate(leaves)])
