"""Decides where an engine's arrays live: whole on one device, or divided over several by their
logical axes.

Tensor parallelism: each device has some of the attention heads with the pages of their KV heads,
some of the feed-forward dimension or of the experts, and some of the vocabulary; what goes from
layer to layer is whole on every device. So a layer adds up across devices twice, after its
attention and after its MLP. Source: Megatron-LM, arXiv 1909.08053, section 3.

The mesh has one axis; where there are more devices than KV heads, more: neighbouring devices then
have the same KV head, which its first axes divide alone, and each attends to it with query heads of
its own. With KV heads of several numbers, by the kind of layer, there is an axis for each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from inspect import Parameter, signature
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxkv.axes import MeshAxes, axis_names, joined, num_axes
from jaxkv.config import is_int
from jaxkv.kv.state import PagedKV, Store
from jaxkv.models import differential
from jaxkv.models.families import Layout, Leaf
from jaxkv.models.recurrent import StateArray
from jaxkv.models.spec import IndexSpec, KVGroup, ModelSpec
from jaxkv.weights.packing import FACTOR, TABLE, base_name, num_bytes
from jaxkv.weights.tree import (
    ADAPTER_DOWN,
    ADAPTER_UP,
    ADAPTERS,
    DRAFT,
    EXPERT,
    LAYERS,
    stack_name,
)

TENSOR, COPIES = "tensor", "copies"
"""The mesh axis, and how the names begin of those along which devices have the same KV heads."""

MUST_DIVIDE = ("heads", "kv_heads", "ffn", "channels")
"""Logical axes whose parts the devices have. "vocab" is divided too where that leaves no rest."""

WHOLE = PartitionSpec()

EXPERTS = ("experts",)
"""The axes of a routed expert's array where devices have some of the experts each."""

K_AFFINE = f"{LAYERS}.k_affine"
"""The path of the leaf that `programs.fit_keys` adds."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The devices, and for more than one what divides the axes of each leaf of the weight tree, by
    its path: "layers.q". states: how the arrays of recurrent states are divided. context: of the
    devices that have the same KV heads so many divide the tokens of each page between them. shape:
    of the mesh, where devices share KV heads.

    Hashable: a static argument of steps.
    """

    devices: tuple[jax.Device, ...]
    axes: tuple[tuple[str, tuple[MeshAxes | None, ...]], ...] = ()
    states: tuple[tuple[PartitionSpec, ...], ...] = ()
    context: int = 1
    shape: tuple[int, ...] = ()

    def __str__(self) -> str:
        names = ", ".join(map(str, self.devices))
        return names if self.size == 1 else f"each of {names}"

    @property
    def size(self) -> int:
        return len(self.devices)

    def sharding(self, parts: PartitionSpec = WHOLE) -> jax.sharding.Sharding:
        """Returns the sharding of an array that is divided so."""
        return (
            NamedSharding(self.mesh, parts)
            if self.size > 1
            else SingleDeviceSharding(self.devices[0])
        )

    def abstract(self, shape: tuple[int, ...], dtype: Any, parts: PartitionSpec = WHOLE) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self.sharding(parts))

    def weight(self, path: str, shape: tuple[int, ...]) -> PartitionSpec:
        """Returns the sharding of a leaf; one of more dimensions than its logical axes is stacked
        over layers. Of a quantised one (`weights.packing`) columns are divided by groups, or within
        the only one, and all devices have its tables and factors.
        """
        stack, _, name = path.rpartition(".")
        if name.startswith(ADAPTERS):
            return self._adapter(stack, name)
        of = base_name(path)
        parts = list(dict(self.axes).get(of, ()))
        if parts == [*EXPERTS]:  # which come behind the layers, also in tables and factors
            return PartitionSpec(None, self.axis)
        if path.endswith((TABLE, FACTOR)):
            return WHOLE
        num_stacked = 2 if name.startswith(EXPERT) else 1
        if len(parts) == 2 and (of != path or len(shape) == 3 + num_stacked):
            rows, columns = parts
            has_groups = shape[num_stacked] > 1
            parts = [columns if has_groups else None, rows]
            parts += [None if has_groups else columns] * (of == path)
        return PartitionSpec(*[None] * (len(shape) - len(parts)), *parts)

    def _adapter(self, stack: str, name: str) -> PartitionSpec:
        """Returns the sharding of adapters: what goes down is divided as the columns of their
        matrix are, what goes up as its rows are.
        """
        of = name.removeprefix(ADAPTER_DOWN).removeprefix(ADAPTER_UP)
        rows, columns = dict(self.axes).get(f"{stack}.{of}", (None, None))
        parts = (None, columns) if name.startswith(ADAPTER_DOWN) else (rows, None)
        return PartitionSpec(None, None, *parts)

    def weights(self, tree: Any) -> Any:
        """Returns the sharding of every leaf of a weight tree."""
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: self.weight(".".join(one.key for one in path), leaf.shape), tree
        )

    def with_draft(self, draft: Placement) -> Placement:
        """Returns the placement of these weights with those of a draft model on the same mesh."""
        own = tuple((f"{DRAFT}.{path}", axes) for path, axes in draft.axes)
        return replace(self, axes=self.axes + own)

    def copied(self, tree: Any) -> Any:
        """Copies arrays of as many other devices to these, divided as they are there."""

        def copy(x: jax.Array) -> jax.Array:
            parts = x.sharding.spec if isinstance(x.sharding, NamedSharding) else WHOLE
            return jax.device_put(x, self.sharding(parts))

        return jax.tree.map(copy, tree)

    def num_parts(self, parts: MeshAxes | None) -> int:
        """Returns how many parts these axes of the mesh make."""
        lengths = dict(zip(self.mesh_names, self.mesh_shape, strict=True))
        return math.prod(lengths[name] for name in axis_names(parts))

    def num_parts_of_columns(self, path: str) -> int:
        """Returns into how many parts the columns of a matrix are divided."""
        axes = dict(self.axes).get(path, ())
        return 1 if axes[-1:] in ((), EXPERTS) else self.num_parts(axes[-1])

    def token_parts(self, num_parts: int) -> int:
        """Returns over how many devices each page's tokens are divided, where so many divide the
        heads.
        """
        return math.gcd(self.context, self.size // num_parts)

    def of_pages(
        self, num_parts: int, *, page_size: int | None = None
    ) -> tuple[PartitionSpec, PartitionSpec]:
        """Returns how the pages and the extremes of a store are divided: by heads, into so many
        parts, in the order in which those are stored (a device has the keys of its KV heads, then
        their values), and by tokens over the devices that share them, if at all: not where a page
        is of one.
        """
        heads = _first(self.mesh_shape, num_parts)
        num_tokens = 1 if page_size == 1 else self.token_parts(num_parts)
        tokens = _last(self.mesh_shape, num_tokens)
        return _spec(None, heads, tokens), _spec(None, None, heads)

    def kv(self, kv: PagedKV) -> PagedKV:
        """Returns the sharding of the KV state: `of_pages`, and tables and lengths whole."""
        whole: Any = WHOLE

        def of(store: Store) -> Store:
            num_parts, size = store.layout.num_devices(store.pages), store.layout.page_size
            parts: Any = self.of_pages(num_parts, page_size=size)
            pages, extremes = parts
            return replace(
                store,
                pages=pages,
                scales=None if store.scales is None else pages,
                low=None if store.low is None else of(store.low),
                extremes=None if store.extremes is None else extremes,
            )

        rows = jax.tree.map(lambda _: whole, kv.rows)
        states: Any = self.states
        return replace(kv, stores=tuple(map(of, kv.stores)), rows=rows, states=states)

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        return self.shape or (self.size,)

    @property
    def mesh_names(self) -> tuple[str, ...]:
        return _names(self.mesh_shape)

    @property
    def axis(self) -> MeshAxes:
        """Returns what divides something over all devices."""
        return joined(self.mesh_names) or TENSOR

    @property
    def mesh(self) -> Mesh:
        return Mesh(np.array(self.devices).reshape(self.mesh_shape), self.mesh_names)


def _spec(*parts: MeshAxes | None) -> PartitionSpec:
    """Returns the sharding as XLA gives it back: without what divides nothing at the end."""
    count = max((i + 1 for i, part in enumerate(parts) if part is not None), default=0)
    return PartitionSpec(*parts[:count])


def _names(shape: tuple[int, ...]) -> tuple[str, ...]:
    """Returns the names of the axes of a mesh of that shape."""
    return (TENSOR, *[f"{COPIES}{number}" for number in range(len(shape) - 1)])


def _first(shape: tuple[int, ...], num_parts: int) -> MeshAxes | None:
    """Returns the first axes of a mesh of that shape, which make so many parts."""
    return joined(_names(shape)[: num_axes(shape, num_parts)])


def _last(shape: tuple[int, ...], num_parts: int) -> MeshAxes | None:
    """Returns the last axes of a mesh of that shape, which make so many parts."""
    return joined(_names(shape)[len(shape) - num_axes(shape[::-1], num_parts) :])


def on_every_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes function(weights, kv, *inputs, axis=, ...) -> (kv, *outputs) one that takes `placement`
    in place of `axis`: each device runs it on its parts of weights and pages. One without a KV
    state takes inputs only, and returns anything.

    Inputs and outputs are whole: what the devices return must be the same on all. `axis` is the
    mesh axis for the function's own collectives, None on one device.
    """

    @wraps(function)
    def run(weights: Any, *inputs: Any, placement: Placement | None = None, **static: Any) -> Any:
        if placement is None or placement.size == 1:
            return function(weights, *inputs, axis=None, **static)
        kv = [placement.kv(x) for x in inputs[:1] if isinstance(x, PagedKV)]

        def on_one(*given: Any) -> tuple[Any, Any]:
            outputs = function(*given, axis=placement.axis, **static)
            return (outputs[:1], outputs[1:]) if kv else ((), outputs)

        divided = jax.shard_map(
            on_one,
            mesh=placement.mesh,
            in_specs=(placement.weights(weights), *kv, *[WHOLE] * (len(inputs) - len(kv))),
            out_specs=(tuple(kv), WHOLE),
            check_vma=False,
        )
        own, outputs = divided(weights, *inputs)
        return (*own, *outputs) if kv else outputs

    # `jit` finds the arguments to donate by their names.
    given = signature(function)
    taken = Parameter("placement", Parameter.KEYWORD_ONLY, default=None)
    names = [taken if name == "axis" else one for name, one in given.parameters.items()]
    run.__signature__ = given.replace(parameters=names)  # type: ignore[attr-defined]
    return run


class OnMesh(NamedTuple):
    """Names what a mesh divides: a model, and as in `place` over how many devices the tokens of its
    pages.
    """

    spec: ModelSpec
    layout: Layout
    context: int


def place(
    spec: ModelSpec,
    layout: Layout,
    devices: Sequence[jax.Device],
    size: Any = 1,
    *,
    context: Any = 1,
    by_expert: bool = False,
    beside: OnMesh | None = None,
) -> Placement:
    """Takes the first `size` of the devices, each with its part of the model. context: how many of
    the devices that have the same KV heads divide the tokens of pages between them. by_expert: a
    device has some routed experts and all of each, not a part of each. beside: another model on the
    same mesh, whose placement is made with this one beside it.

    Raises: ValueError if there are fewer, or the model's heads, feed-forward dimension or experts
    have no such parts, or there is nothing that is to be divided; NotImplementedError for entries
    of several tokens, scores by distance, and numbers of KV heads that do not divide each other.
    """
    if not is_int(size) or not 1 <= size <= len(devices):
        raise ValueError(
            f"tensor_parallel_size: expected 1 to {len(devices)}, the devices here, got {size!r}"
        )
    _check_context(spec, size, context)
    leaves = _leaves(layout)
    routed = {path for path, leaf, _ in leaves if by_expert and _is_routed(path, leaf)}
    if by_expert and not routed:
        raise ValueError("enable_expert_parallel: expected False for a model without experts")
    own = OnMesh(spec, layout, context)
    shape = _mesh_shape([own] if beside is None else [own, beside], size)
    every = _first(shape, size)
    states = tuple(
        tuple(_state_parts(array, every) for array in state.arrays) for state in spec.states
    )
    if size == 1:
        return Placement((devices[0],), states=states)
    _check_parts(spec, layout, size, routed)

    def parts(axis: str | None, length: int, kind: int) -> MeshAxes | None:
        if axis == "kv_heads":
            group, _ = spec.group_of(spec.layers_of(kind)[0])
            return _first(shape, spec.groups[group].num_parts(size))
        is_divided = axis in MUST_DIVIDE or (axis == "vocab" and length % size == 0)
        return every if is_divided else None

    axes = [
        (
            path,
            tuple(
                parts(axis, length, kind)
                for axis, length in zip(leaf.info.logical_axes, leaf.info.shape, strict=True)
            ),
        )
        for path, leaf, kind in leaves
        if path not in routed
    ]
    axes += [(path, EXPERTS) for path in sorted(routed)]
    axes += [(K_AFFINE, (_first(shape, group.num_parts(size)),)) for group in spec.groups[:1]]
    return Placement(tuple(devices[:size]), tuple(axes), states, context, shape)


def _leaves(layout: Layout) -> list[tuple[str, Leaf, int]]:
    """Lists the leaves with their paths in the weight tree and their kinds of layers."""
    found = [(name, leaf, 0) for name, leaf in layout.top.items()]
    for kind, leaves in enumerate(layout.layers):
        found += [(f"{stack_name(kind)}.{name}", leaf, kind) for name, leaf in leaves.items()]
    return found


def _check_parts(spec: ModelSpec, layout: Layout, size: int, routed: Collection[str]) -> None:
    """Raises: ValueError if what devices divide cannot be divided by so many. routed: the paths of
    experts that are whole.
    """
    groups = [group for group in spec.groups if group.layers]
    lengths = {("attention heads", group.num_heads or spec.num_heads) for group in groups}
    if any(differential.FIRST[0] in own for own in layout.layers):
        lengths.add(("pairs of attention heads", spec.num_heads // 2))
    if spec.attention.output_groups > 1:
        lengths.add(("groups of attention heads", spec.attention.output_groups))
    for path, leaf, _ in _leaves(layout):
        if path in routed:
            lengths.add(("experts", leaf.num_experts))
            continue
        sizes = zip(leaf.info.logical_axes, leaf.info.shape, strict=True)
        names = {"ffn": "feed-forward dimension", "channels": "recurrent channels"}
        lengths |= {(names[axis], length) for axis, length in sizes if axis in names}
    for array in (array for state in spec.states for array in state.arrays):
        if array.axis is not None:
            lengths.add(("recurrent channels or heads", array.shape[array.axis]))
    for what, length in sorted(lengths):
        if length % size:
            raise ValueError(
                f"tensor_parallel_size: expected a divisor of the model's {length} {what}, got "
                f"{size}"
            )


def _mesh_shape(models: Sequence[OnMesh], size: int) -> tuple[int, ...]:
    """Returns the shape of the mesh: one axis, or more where devices share KV heads. So many parts
    as there are of something are those of its first axes, or of its last for tokens.

    Raises: ValueError for KV heads that cannot be divided or shared so, NotImplementedError for
    numbers of them that have no such axes.
    """
    numbers = {size}
    every = [(group, one) for one in models for group in one.spec.groups if group.layers]
    for group, model in every:
        can_share = _can_share(group, model.layout)
        heads, is_latent = group.num_kv_heads, group.latent_dim is not None
        is_shared = size % heads == 0 and can_share
        if heads % size and not is_shared and not is_latent:
            expected = "a divisor or a multiple" if can_share else "a divisor"
            raise ValueError(
                f"tensor_parallel_size: expected {expected} of the model's {heads} KV heads, got "
                f"{size}"
            )
        num_parts = group.num_parts(size)
        numbers |= {num_parts, size // math.gcd(model.context, size // num_parts)}
    parts = sorted(numbers - {1}) or [1]
    shape = [parts[0], *(b // a for a, b in pairwise(parts))]
    if any(b % a for a, b in pairwise(parts)):
        context = models[0].context
        divided = "" if context == 1 else f" and decode_context_parallel_size {context}"
        raise NotImplementedError(
            f"tensor_parallel_size: expected numbers of KV heads that divide each other where "
            f"devices share some, got parts of {', '.join(map(str, parts[:-1]))} with {size}"
            f"{divided}"
        )
    return tuple(shape)


KEY_LEAVES = {"k", "v", "k_bias", "v_bias", "k_norm", "k_norm_bias"}
"""Arrays with a part for each KV head, all that most models have."""


def _can_share(group: KVGroup, layout: Layout) -> bool:
    """Says whether devices may have the same KV heads: not where they keep more of each than keys
    and values.
    """
    has_more = any(
        "kv_heads" in leaf.info.logical_axes and path.rpartition(".")[2] not in KEY_LEAVES
        for path, leaf, _ in _leaves(layout)
    )
    return not (has_more or group.has_index_key or layout.also)


def _is_routed(path: str, leaf: Leaf) -> bool:
    """Tells a routed expert's MLP from heads that are chosen (`models.attention_experts`)."""
    return path.rpartition(".")[2].startswith(EXPERT) and {"heads", "kv_heads"}.isdisjoint(
        leaf.info.logical_axes
    )


def most_context(spec: ModelSpec, size: int) -> int:
    """Returns how many of so many devices have the same KV heads, where most do."""
    parts = [group.num_parts(size) for group in spec.groups if group.layers]
    return max((size // count for count in parts), default=1)


def _check_context(spec: ModelSpec, size: int, context: Any) -> None:
    """Raises: as `place`."""
    most = most_context(spec, size)
    expected = f"decode_context_parallel_size: expected 1, got {context!r}"
    if not is_int(context) or context < 1 or most % context:
        if not spec.kv_layers:
            raise ValueError(f"{expected}, for a model without attention")
        if size == 1:
            raise ValueError(
                f"decode_context_parallel_size: expected 1, got {context!r}, with "
                f"tensor_parallel_size 1"
            )
        if most == 1:
            raise ValueError(
                f"decode_context_parallel_size: expected 1, got {context!r}: each of {size} "
                f"devices has KV heads of its own"
            )
        raise ValueError(
            f"decode_context_parallel_size: expected a divisor of {most}, got {context!r}: so many "
            f"of {size} devices have the same KV heads"
        )
    asked = spec.attention
    if context > 1 and (asked.near or not isinstance(asked.index, IndexSpec | None)):
        raise NotImplementedError(f"{expected}, for a model that makes one entry of several tokens")
    if context > 1 and asked.has_distances:
        raise NotImplementedError(f"{expected}, for a model with scores by distance")


def _state_parts(array: StateArray, every: MeshAxes | None) -> PartitionSpec:
    """Returns how a pool of such states, with layers and slots in front, is divided by all."""
    return WHOLE if array.axis is None else PartitionSpec(*[None] * (array.axis + 1), every)


def bytes_per_device(tree: Any) -> int:
    """Counts what the arrays of a tree take on one of their devices."""

    def of(x: Any) -> int:
        sharding = getattr(x, "sharding", None)
        shape = x.shape if sharding is None else sharding.shard_shape(x.shape)
        return num_bytes(shape, x.dtype)

    return sum(map(of, jax.tree.leaves(tree)))
