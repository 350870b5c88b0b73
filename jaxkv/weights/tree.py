"""Owns the form of the weight tree: {"embed": [V, D], "norm": [D], "head": [V, D] only if untied,
"layers": {"q": [L, N*H, D], ...}}.

Each kind of tensor of the layers is one stacked leaf with the layers in front, whatever KV groups
the layers are in, so that one body, compiled once, runs them all. Everybody else asks here: loaders
which leaves there are and what they are made of, the decoder for the weights of one layer.

A uint16 leaf holds the bits of bfloat16 values (`config.bfloat16_as_bits`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax

from jaxkv.axes import Array
from jaxkv.models.families import Layout, Leaf
from jaxkv.models.spec import ModelSpec
from jaxkv.ops.layers import Matrix, values

Weights = Mapping[str, Any]

LAYERS = "layers"


class TreeLeaf(NamedTuple):
    """Describes one array of the tree.

    name     its key, by which a `Placement` knows it: `embed`, `q`.
    one      what the family says of it, or of its part in one layer.
    sources  the tensors of a checkpoint that it is made of or a part of, in their order in it.
    """

    name: str
    one: Leaf
    sources: tuple[str, ...]
    shape: tuple[int, ...]
    is_stacked: bool

    @property
    def path(self) -> str:
        """Returns where it is in the tree: `embed`, `layers.q`."""
        return f"{LAYERS}.{self.name}" if self.is_stacked else self.name


def tree_leaves(spec: ModelSpec, layout: Layout) -> list[TreeLeaf]:
    """Returns every leaf of the model's weight tree, those outside the layers first."""
    top = [
        TreeLeaf(name, leaf, (leaf.source,), leaf.info.shape, is_stacked=False)
        for name, leaf in layout.top.items()
    ]
    layers = [
        TreeLeaf(
            name,
            leaf,
            tuple(
                leaf.source.format(layer=layer, head=head)
                for layer in range(spec.num_layers)
                for head in range(leaf.num_sources)
            ),
            (spec.num_layers, *leaf.info.shape),
            is_stacked=True,
        )
        for name, leaf in layout.layer.items()
    ]
    return top + layers


def make_tree(arrays: Iterable[tuple[TreeLeaf, Any]]) -> dict[str, Any]:
    """Returns the weight tree of these arrays, each beside the leaf that it is."""
    weights: dict[str, Any] = {LAYERS: {}}
    for leaf, array in arrays:
        where = weights[LAYERS] if leaf.is_stacked else weights
        where[leaf.name] = array
    return weights


def with_layer_leaf(weights: Weights, name: str, stacked: Any) -> dict[str, Any]:
    """Returns the tree with one more stacked leaf in its layers."""
    return {**weights, LAYERS: {**weights[LAYERS], name: stacked}}


def layer_weights(weights: Weights, layer: Array) -> dict[str, Any]:
    """Returns the weights of one layer by name: vectors and numbers as values, matrices as
    `Matrix`, which stays in its stack until a matmul reads it.
    """
    return {
        name: values(leaf[layer]) if leaf.ndim < 3 else Matrix(leaf, layer)
        for name, leaf in weights[LAYERS].items()
    }


def is_stacked(path: tuple[Any, ...]) -> bool:
    """Says whether the leaf at this path of a weight tree has the layers in front; the path is one
    of `jax.tree_util.tree_leaves_with_path`.
    """
    return path[0] == jax.tree_util.DictKey(LAYERS)
