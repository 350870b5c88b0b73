"""Weights of a model that nobody has trained: for measuring speed and memory without a
checkpoint.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.config import bfloat16_as_bits
from jaxkv.models.families import Layout
from jaxkv.models.quantisation import Quantisation
from jaxkv.models.spec import ModelSpec
from jaxkv.processes import to_devices
from jaxkv.weights.formats import FP4, expected_packing
from jaxkv.weights.load import Kept
from jaxkv.weights.packing import (
    FACTOR,
    LARGEST,
    SCALES,
    TABLE,
    WITH_HEAD,
    ZEROS,
    base_name,
    packing_for,
)
from jaxkv.weights.tree import (
    HEAD,
    TreeLeaf,
    is_matrix,
    is_stacked,
    make_tree,
    num_stacked,
    tree_leaves,
)


def leaf_arrays(
    leaf: TreeLeaf, stored: Quantisation | None, kept: Kept, *, in_pairs: bool = False
) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
    """Returns shapes and dtypes of the arrays that a leaf becomes, by what follows its name.
    stored: how the checkpoint is quantised. in_pairs: as in `Packing.arrays`.
    """
    packing, shape, dtype = None, leaf.shape, kept.dtype
    if leaf.path == HEAD and kept.quantization in WITH_HEAD:
        size = kept.placed.size
        packing = packing_for(kept.quantization, leaf.shape[-1], size, dtype=dtype)
        shape = (1, *leaf.shape)
    elif is_matrix(leaf) and stored is not None:
        num_parts = kept.num_parts(leaf)
        packing = expected_packing(leaf.one, stored, num_parts=num_parts, dtype=dtype)
    else:
        packing = kept.packing(leaf)
    if packing is None:
        return {"": (shape, leaf.kept_as(dtype))}
    return packing.arrays(shape, in_pairs=in_pairs)


def sure_leaves(spec: ModelSpec, layout: Layout, quantization: str | None) -> list[TreeLeaf]:
    """Returns the leaves that a tree has whatever its checkpoint stores: a head that may be tied is
    none, unless it is quantised, which embeddings are not.
    """
    return [
        leaf
        for leaf in tree_leaves(spec, layout)
        if leaf.one.same_as is None or (leaf.path == HEAD and quantization in WITH_HEAD)
    ]


def weight_shapes(spec: ModelSpec, layout: Layout, kept: Kept) -> dict[str, Any]:
    """Returns the weight tree that `load_weights` makes, as shapes with their shardings; a head
    that may be tied is, and what a checkpoint stores quantised is as its config says.
    """
    placement = kept.placed
    in_pairs = bfloat16_as_bits(placement.devices[0].platform)

    def abstract(leaf: TreeLeaf) -> dict[str, jax.ShapeDtypeStruct]:
        arrays = leaf_arrays(leaf, layout.quantisation, kept, in_pairs=in_pairs)
        return {
            suffix: placement.abstract(shape, kind, placement.weight(leaf.path + suffix, shape))
            for suffix, (shape, kind) in arrays.items()
        }

    leaves = sure_leaves(spec, layout, kept.quantization)
    return make_tree((leaf, abstract(leaf)) for leaf in leaves)


def random_weights(spec: ModelSpec, layout: Layout, kept: Kept, *, seed: int) -> dict[str, Any]:
    """Draws the weight tree of `load_weights` on the first device, so that it takes seconds at any
    size.

    Vectors are 1, and whole numbers all that there may be by turns; matrices are uniform with
    variance 1 / (their last dimension), which keeps activations near 1. Quantised ones are uniform
    too, with equal scales.
    """

    named = (one for stack in layout.layers for one in stack.items())
    below = {name: one.info.below for name, one in named if one.info.below is not None}

    def draw(number: int, path: Any, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(seed, impl="rbg"), number)
        name, stack = path[-1].key, shapes[path[0].key] if is_stacked(path) else shapes
        if name.endswith(SCALES):
            values = stack[base_name(name)]
            is_paired = values.dtype == jnp.uint8
            num_columns = values.shape[-3] * values.shape[-1] * (2 if is_paired else 1)
            most = LARGEST["int4" if is_paired else values.dtype.name]
            x = jnp.full(leaf.shape, (3 / num_columns) ** 0.5 / most, leaf.dtype)
        elif name.endswith(TABLE):
            x = jnp.broadcast_to(FP4, leaf.shape)
        elif name in below:
            x = (jnp.arange(leaf.size, dtype=leaf.dtype) % below[name]).reshape(leaf.shape)
        elif name.endswith(ZEROS):
            x = jnp.zeros(leaf.shape, leaf.dtype)
        elif name.endswith(FACTOR):
            x = jnp.ones(leaf.shape, leaf.dtype)
        elif leaf.dtype == jnp.uint8:
            x = jax.random.bits(key, leaf.shape, jnp.uint8)
        elif leaf.dtype.name in LARGEST:
            most = LARGEST[leaf.dtype.name]
            drawn = jax.random.uniform(key, leaf.shape, jnp.bfloat16, -most, most)
            is_float = leaf.dtype.name.startswith("float")
            x = (drawn if is_float else jnp.round(drawn)).astype(leaf.dtype)
        elif len(leaf.shape) - num_stacked(path) == 1:
            x = jnp.ones(leaf.shape, leaf.dtype)
        else:
            bound = (3 / leaf.shape[-1]) ** 0.5
            x = jax.random.uniform(key, leaf.shape, leaf.dtype, -bound, bound)
        if kept.as_bits and x.dtype == kept.dtype:
            x = jax.lax.bitcast_convert_type(x, jnp.uint16)
        return to_devices(x, leaf.sharding).block_until_ready()

    shapes = weight_shapes(spec, layout, kept)
    leaves, tree = jax.tree_util.tree_flatten_with_path(shapes)
    return jax.tree.unflatten(tree, [draw(number, *leaf) for number, leaf in enumerate(leaves)])
