"""Owns the form of the weight tree: {"embed": [V, D], "norm": [D], "head": [V, D] only if untied,
"layers": {"q": [L, N*H, D], ...}}, and "layers_1" and so on for layers of further kinds.

Each kind of tensor of the layers is one stacked leaf with the layers in front, whatever KV groups
the layers are in, so that one body, compiled once, runs them all. Everybody else asks here: loaders
which leaves there are and what they are made of, the decoder for the weights of one layer.

A uint16 leaf holds the bits of bfloat16 values (`config.bfloat16_as_bits`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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
    stack: str | None = None

    @property
    def path(self) -> str:
        """Returns where it is in the tree: `embed`, `layers.q`."""
        return self.name if self.stack is None else f"{self.stack}.{self.name}"

    @property
    def is_stacked(self) -> bool:
        return self.stack is not None


def tree_leaves(spec: ModelSpec, layout: Layout) -> list[TreeLeaf]:
    """Returns every leaf of the model's weight tree, those outside the layers first."""
    top = [
        TreeLeaf(name, leaf, (leaf.source,), leaf.info.shape) for name, leaf in layout.top.items()
    ]
    layers = [
        _stacked(name, leaf, kind, spec.layers_of(kind))
        for kind, leaves in enumerate(layout.layers)
        for name, leaf in leaves.items()
    ]
    return top + layers


def _stacked(name: str, leaf: Leaf, kind: int, layers: Sequence[int]) -> TreeLeaf:
    sources = tuple(
        leaf.source.format(layer=layer, head=head)
        for layer in layers
        for head in range(leaf.num_sources)
    )
    return TreeLeaf(name, leaf, sources, (len(layers), *leaf.info.shape), stack_name(kind))


def stack_name(kind: int) -> str:
    """Returns under which key the layers of a kind are."""
    return LAYERS if kind == 0 else f"{LAYERS}_{kind}"


def make_tree(arrays: Iterable[tuple[TreeLeaf, Any]]) -> dict[str, Any]:
    """Returns the weight tree of these arrays, each beside the leaf that it is."""
    weights: dict[str, Any] = {LAYERS: {}}
    for leaf, array in arrays:
        where = weights if leaf.stack is None else weights.setdefault(leaf.stack, {})
        where[leaf.name] = array
    return weights


def with_layer_leaf(weights: Weights, name: str, stacked: Any) -> dict[str, Any]:
    """Returns the tree with one more stacked leaf in its layers."""
    return {**weights, LAYERS: {**weights[LAYERS], name: stacked}}


def layer_weights(weights: Weights, layer: Array, kind: int = 0) -> dict[str, Any]:
    """Returns the weights of one layer of a kind, counted among those, by name: vectors and numbers
    as values, matrices as `Matrix`, which stays in its stack until a matmul reads it.
    """
    return {
        name: values(leaf[layer]) if leaf.ndim < 3 else Matrix(leaf, layer)
        for name, leaf in weights[stack_name(kind)].items()
    }


def is_stacked(path: tuple[Any, ...]) -> bool:
    """Says whether the leaf at this path of a weight tree has the layers in front; the path is one
    of `jax.tree_util.tree_leaves_with_path`.
    """
    first = path[0]
    return isinstance(first, jax.tree_util.DictKey) and str(first.key).startswith(LAYERS)
