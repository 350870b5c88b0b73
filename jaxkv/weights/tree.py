"""Owns the form of the weight tree: {"embed": [V, D], "norm": [D], "head": [V, D] only if untied,
"layers": {"q": [L, N*H, D], ...}}, and "layers_1" and so on for layers of further kinds.

Each kind of tensor of the layers is one stacked leaf with the layers in front, whatever KV groups
the layers are in, so that one body, compiled once, runs them all. Those of experts have both in
front, [L, E, ...]: with one axis for both, which may be a multiple of 128 where no other is, a TPU
would by default lay neighbouring experts side by side, and copy all of them to read one. Of what
layers share (`Leaf.num_shared`) a stack has fewer than there are layers of its kind, which take
turns with it. Everybody else asks here: loaders which leaves there are and what they are made of,
the decoder for the weights of one layer.

A uint16 leaf holds the bits of bfloat16 values (`config.bfloat16_as_bits`). A quantised leaf `q` is
values with `q_scales` beside it, and maybe `q_zeros`, `q_table` and `q_factor`
(`weights.packing`). A quantised head is a stack of one, and is there whether embeddings are tied or
not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.axes import Array, ArrayInfo
from jaxkv.models.families import Layout, Leaf
from jaxkv.models.spec import ModelSpec
from jaxkv.ops.adapters import Adapted, TokenAdapters
from jaxkv.ops.matrices import (
    AnyMatrix,
    HeadMatrices,
    Matrix,
    Packed,
    Summed,
    Table,
    Vectors,
    values,
)
from jaxkv.weights.packing import (
    DYNAMIC,
    FACTOR,
    SCALES,
    TABLE,
    ZEROS,
    base_name,
    num_bytes,
)

Weights = Mapping[str, Any]

LAYERS, EXPERT, HEAD = "layers", "expert_", "head"

TOKEN_EXPERTS = "token_experts"
"""A leaf of layers whose router weighs experts that a table has for each token's id, [V * K]."""

DRAFT = "draft"
"""Under this name programs get the whole tree of a draft model beside the model's own arrays."""

ADAPTER_DOWN, ADAPTER_UP = "adapter_down_", "adapter_up_"
"""These precede the name of a matrix in the names of what adapters add to it, [L, A, X, D]
and [L, A, F, X] for A adapters of rank X at most.
"""

ADAPTERS = (ADAPTER_DOWN, ADAPTER_UP)

LOW_DOWN, LOW_UP = "low_down_", "low_up_"
"""These precede the name of a matrix that layers share in the names of the product of low rank that
each layer adds to it, [L, X, D] and [L, F, X].
"""


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

    def kept_as(self, dtype: str) -> np.dtype[Any]:
        """Returns the dtype of its array in a tree of this one, if that is not quantised.

        Vectors, and what chooses experts or weighs streams, stay float32: published checkpoints
        have biases of routers so, which differ by less than bfloat16 tells apart.
        """
        info = self.one.info
        if info.below is not None:
            return info.dtype
        return jnp.dtype(np.float32 if len(info.shape) == 1 or is_chooser(info) else dtype)


def tree_leaves(spec: ModelSpec, layout: Layout) -> list[TreeLeaf]:
    """Returns every leaf of the model's weight tree, those outside the layers first."""
    top = [
        TreeLeaf(name, leaf, (leaf.source,), leaf.info.shape) for name, leaf in layout.top.items()
    ]
    layers = [
        _stacked(name, leaf, kind, _numbers(spec, layout, kind))
        for kind, leaves in enumerate(layout.layers)
        for name, leaf in leaves.items()
    ]
    return top + layers


def _numbers(spec: ModelSpec, layout: Layout, kind: int) -> Sequence[int]:
    """Lists the numbers that the layers of a kind have in names, each once."""
    layers = spec.layers_of(kind)
    return list(dict.fromkeys(layout.numbers[x] for x in layers)) if layout.numbers else layers


def _stacked(name: str, leaf: Leaf, kind: int, layers: Sequence[int]) -> TreeLeaf:
    num_named = leaf.num_experts if "{expert}" in leaf.source else leaf.num_sources
    turn = leaf.num_shared or len(layers)
    count = len(layers) if "{use}" in leaf.source else min(turn, len(layers))
    named = [(use, layers[use % turn]) for use in range(count)]
    sources = tuple(
        leaf.source.format(
            layer=layer, pair=layer // 2, half=layer % 2, head=number, expert=number, use=use
        )
        for use, layer in named
        for number in range(num_named)
    )
    front = (count, leaf.num_experts) if name.startswith(EXPERT) else (count,)
    return TreeLeaf(name, leaf, sources, (*front, *leaf.info.shape), stack_name(kind))


def stack_name(kind: int) -> str:
    """Returns under which key the layers of a kind are."""
    return LAYERS if kind == 0 else f"{LAYERS}_{kind}"


def make_tree(arrays: Iterable[tuple[TreeLeaf, Mapping[str, Any]]]) -> dict[str, Any]:
    """Returns the weight tree of these arrays: for each leaf those that it is made of, by what
    follows its name, one under "" unless it is quantised (`Packing.arrays`).
    """
    weights: dict[str, Any] = {LAYERS: {}}
    for leaf, parts in arrays:
        where = weights if leaf.stack is None else weights.setdefault(leaf.stack, {})
        where |= {leaf.name + suffix: array for suffix, array in parts.items()}
    return weights


def with_layer_leaf(weights: Weights, name: str, stacked: Any) -> dict[str, Any]:
    """Returns the tree with one more stacked leaf in its layers."""
    return {**weights, LAYERS: {**weights[LAYERS], name: stacked}}


def layer_leaf(weights: Weights, name: str) -> jax.Array | None:
    """Returns a stacked leaf of the first kind of layers; None if they have none of that name."""
    found: jax.Array | None = weights[LAYERS].get(name)
    return found


def chooses_by_token(weights: Weights) -> bool:
    """Tells whether layers look up the experts of a token by its id."""
    stacks = (stack for name, stack in weights.items() if name.startswith(LAYERS))
    return any(TOKEN_EXPERTS in stack for stack in stacks)


def is_matrix(leaf: TreeLeaf) -> bool:
    """Tells whether the leaf may be kept quantised: it is a linear map of each layer, does not
    choose experts or weigh streams, and is no table.
    """
    info = leaf.one.info
    is_linear = info.below is None and len(info.shape) == 2 and not is_chooser(info)
    return leaf.is_stacked and is_linear and "ngrams" not in info.logical_axes


def is_chooser(info: ArrayInfo) -> bool:
    """Tells whether an array chooses experts or weighs streams."""
    return not {"experts", "streams"}.isdisjoint(info.logical_axes)


def describe_packed(weights: Weights) -> str:
    """Says which matrices are kept quantised, in what, and how many bytes all of them have; "" if
    none is.
    """
    nbytes, kinds = 0, dict[str, list[str]]()
    stacks = [stack for name, stack in weights.items() if name.startswith(LAYERS)]
    for stack in (*stacks, {name: leaf for name, leaf in weights.items() if name.startswith(HEAD)}):
        for name in dict.fromkeys(base_name(name) for name in stack if base_name(name) != name):
            parts = [part for other, part in stack.items() if base_name(other) == name]
            nbytes += sum(num_bytes(part.shape, part.dtype) for part in parts)
            values = stack[name]
            dtype, width = ("int4", 2) if values.dtype == np.uint8 else (values.dtype.name, 1)
            dtype = "codes of 4 bits" if name + TABLE in stack else dtype
            group = "" if values.shape[-3] == 1 else f" by {width * values.shape[-1]}"
            names = kinds.setdefault(dtype + group, [])
            names += [] if name in names else [name]
    if not kinds:
        return ""
    listed = "; ".join(f"{', '.join(names)} in {kind}" for kind, names in kinds.items())
    return f"; {nbytes / 2**20:.1f} MiB of them quantised: {listed}"


def with_adapters(weights: Weights, adapters: Weights) -> Weights:
    """Returns the tree with adapters in the stacks that they are added to."""
    if not adapters:
        return weights
    return {**weights, **{name: {**weights[name], **own} for name, own in adapters.items()}}


def adapters_of(weights: Weights) -> dict[str, dict[str, Any]]:
    """Returns the adapters that a tree has, as `with_adapters` takes them."""
    stacks = {
        name: {key: leaf for key, leaf in stack.items() if key.startswith(ADAPTERS)}
        for name, stack in weights.items()
        if name.startswith(LAYERS)
    }
    return {name: stack for name, stack in stacks.items() if stack}


def without_adapters(weights: Weights) -> Weights:
    """Returns the tree as it was before `with_adapters`."""
    found = {**weights}
    for name, own in adapters_of(weights).items():
        found[name] = {key: leaf for key, leaf in weights[name].items() if key not in own}
    return found


def with_draft(weights: Weights, draft: Weights) -> Weights:
    """Returns the tree with that of a draft model in it, {} for none."""
    return {**weights, DRAFT: draft} if draft else weights


def draft_of(weights: Weights) -> Weights:
    """Returns the tree of the draft model, {} without one."""
    found: Weights = weights.get(DRAFT, {})
    return found


def without_draft(weights: Weights) -> Weights:
    """Returns the tree as it was before `with_draft`."""
    return {name: leaf for name, leaf in weights.items() if name != DRAFT}


def num_adapters(weights: Weights) -> int:
    """Counts the adapters that the tree has room for."""
    leaves = jax.tree.leaves(adapters_of(weights))
    return leaves[0].shape[1] if leaves else 0


def num_modules(weights: Weights, kind: int) -> int:
    """Counts the layers of a kind that have weights of their own; others take turns with these."""
    return max(leaf.shape[0] for leaf in weights[stack_name(kind)].values())


def layer_weights(
    weights: Weights, layer: Array, kind: int, adapters: TokenAdapters | None
) -> dict[str, Any]:
    """Returns the weights of one layer of a kind, counted among those, by name: vectors and numbers
    as values, matrices as `Matrix` or `Packed`, which stay in their stack until a matmul reads
    them, and tables as `Table`; those of experts still of all of the layer's (`of_expert`). What
    layers share comes with what this one adds to it.
    adapters: those of the step's tokens, which are added to matrices that have some.
    """
    stack = weights[stack_name(kind)]
    dtype = Matrix(weights["embed"]).dtype
    num_layers = num_modules(weights, kind)

    def of_layer(
        name: str, leaf: Array, layer: Array
    ) -> Array | AnyMatrix | HeadMatrices | Table | Vectors:
        is_expert = name.startswith(EXPERT)
        for suffix in (SCALES, DYNAMIC):
            if (scales := stack.get(name + suffix)) is not None:
                zeros, tables, factors = (stack.get(name + end) for end in (ZEROS, TABLE, FACTOR))
                is_dynamic = suffix == DYNAMIC
                return Packed(leaf, scales, zeros, tables, factors, layer, dtype, is_dynamic)
        if leaf.dtype == jnp.int32:
            return Table(leaf, layer)
        if leaf.ndim - is_expert == 4:
            return HeadMatrices(leaf, layer)
        if leaf.ndim - is_expert == 3:
            return Matrix(leaf, layer)
        return Vectors(leaf, layer) if is_expert else values(leaf[layer])

    found: dict[str, Any] = {}
    for name, leaf in stack.items():
        if base_name(name) == name and not name.startswith(ADAPTERS):
            size = leaf.shape[0]
            own: Any = of_layer(name, leaf, layer if size == num_layers else layer % size)
            if LOW_UP + name in stack:
                names = (LOW_DOWN + name, LOW_UP + name)
                low_rank: list[Any] = [of_layer(one, stack[one], layer) for one in names]
                own = Summed(own, *low_rank)
            if adapters is not None and ADAPTER_UP + name in stack:
                down, up = stack[ADAPTER_DOWN + name], stack[ADAPTER_UP + name]
                own = Adapted(own, down, up, layer, adapters)
            found[name] = own
    return found


def head_matrix(weights: Weights) -> AnyMatrix:
    """Returns what makes logits: the head, or the embeddings that are it."""
    leaf = weights[HEAD if HEAD in weights else "embed"]
    scales = weights.get(HEAD + DYNAMIC)
    if scales is None:
        return Matrix(leaf)
    return Packed(leaf, scales, None, None, None, 0, np.dtype(np.float32), is_dynamic=True)


def is_stacked(path: tuple[Any, ...]) -> bool:
    """Says whether the leaf at this path of a weight tree has the layers in front; the path is one
    of `jax.tree_util.tree_leaves_with_path`.
    """
    first = path[0]
    return isinstance(first, jax.tree_util.DictKey) and str(first.key).startswith(LAYERS)


def num_stacked(path: tuple[Any, ...]) -> int:
    """Counts the axes of the leaf at this path that are of layers and experts."""
    return 0 if not is_stacked(path) else 2 if path[-1].key.startswith(EXPERT) else 1
