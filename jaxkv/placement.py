"""Decides where an engine's arrays live: whole on one device, or divided over several by their
logical axes.

Tensor parallelism over one mesh axis: each device has some of the attention heads with the pages of
their KV heads, some of the feed-forward dimension or of the experts, and some of the vocabulary;
what goes from layer to layer is whole on every device. So a layer adds up across devices twice,
after its attention and after its MLP. Source: Megatron-LM, arXiv 1909.08053, section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from inspect import Parameter, signature
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxkv.config import is_int
from jaxkv.kv.layout import PageLayout
from jaxkv.kv.state import PagedKV, Store
from jaxkv.models import differential
from jaxkv.models.families import Layout, Leaf
from jaxkv.models.recurrent import StateArray
from jaxkv.models.spec import IndexSpec, KVGroup, ModelSpec
from jaxkv.weights.packing import FACTOR, TABLE, base_name, num_bytes
from jaxkv.weights.tree import ADAPTER_DOWN, ADAPTER_UP, ADAPTERS, EXPERT

TENSOR = "tensor"
"""The mesh axis."""

MUST_DIVIDE = ("heads", "kv_heads", "ffn", "channels")
"""Logical axes whose parts the devices have. "vocab" is divided too where that leaves no rest."""

WHOLE = PartitionSpec()
EXTREMES = PartitionSpec(None, None, TENSOR)
PAGES = PartitionSpec(None, TENSOR)
"""Pages are divided by heads, in the order in which those are stored: a device has the keys of its
KV heads, then their values.
"""

TOKENS = PartitionSpec(None, None, TENSOR)
"""Pages of latent attention, whose rows are of all heads, are divided by tokens if at all."""

EXPERTS = ("experts",)
"""The axes of a routed expert's array where devices have some of the experts each."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The devices, and for more than one the logical axes of each leaf of the weight tree by its
    name. states: how the arrays of recurrent states are divided. divides_tokens: of each page of
    latent attention a device has some of the tokens; else all of them.

    Hashable: a static argument of steps.
    """

    devices: tuple[jax.Device, ...]
    axes: tuple[tuple[str, tuple[str | None, ...]], ...] = ()
    states: tuple[tuple[PartitionSpec, ...], ...] = ()
    divides_tokens: bool = False

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

    def weight(self, name: str, shape: tuple[int, ...]) -> PartitionSpec:
        """Returns the sharding of a leaf; one of more dimensions than its logical axes is stacked
        over layers. Of a quantised one (`weights.packing`) columns are divided by groups, or within
        the only one, and all devices have its tables and factors.
        """
        if name.startswith(ADAPTERS):
            return self._adapter(name)
        of = base_name(name)
        axes = dict(self.axes).get(of, ())
        if axes == EXPERTS:  # which come behind the layers, also in tables and factors
            return PartitionSpec(None, TENSOR)
        if name.endswith((TABLE, FACTOR)):
            return WHOLE
        parts = [TENSOR if axis in (*MUST_DIVIDE, "vocab") else None for axis in axes]
        num_stacked = 2 if name.startswith(EXPERT) else 1
        if len(parts) == 2 and (of != name or len(shape) == 3 + num_stacked):
            rows, columns = parts
            has_groups = shape[num_stacked] > 1
            parts = [columns if has_groups else None, rows]
            parts += [None if has_groups else columns] * (of == name)
        return PartitionSpec(*[None] * (len(shape) - len(parts)), *parts)

    def _adapter(self, name: str) -> PartitionSpec:
        """Returns the sharding of adapters: what goes down is divided as the columns of their
        matrix are, what goes up as its rows are.
        """
        of = name.removeprefix(ADAPTER_DOWN).removeprefix(ADAPTER_UP)
        rows, columns = self.weight(of, (0, 0)) if dict(self.axes).get(of) else (None, None)
        parts = (None, columns) if name.startswith(ADAPTER_DOWN) else (rows, None)
        return PartitionSpec(None, None, *parts)

    def weights(self, tree: Any) -> Any:
        """Returns the sharding of every leaf of a weight tree."""
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: self.weight(path[-1].key, leaf.shape), tree
        )

    def copied(self, tree: Any) -> Any:
        """Copies arrays of as many other devices to these, divided as they are there."""

        def copy(x: jax.Array) -> jax.Array:
            parts = x.sharding.spec if isinstance(x.sharding, NamedSharding) else WHOLE
            return jax.device_put(x, self.sharding(parts))

        return jax.tree.map(copy, tree)

    def num_parts_of_columns(self, name: str) -> int:
        """Returns into how many parts the columns of a matrix are divided."""
        axes = dict(self.axes).get(name, ())
        return self.size if axes[-1:] and axes[-1] in MUST_DIVIDE else 1

    def of_pages(self, layout: PageLayout) -> tuple[PartitionSpec, PartitionSpec]:
        """Returns how the pages and the extremes of a store are divided: not by heads where one row
        is the key of every head.
        """
        if layout.latent_dim is None:
            return PAGES, EXTREMES
        return (TOKENS if self.divides_tokens else WHOLE), WHOLE

    def kv(self, kv: PagedKV) -> PagedKV:
        """Returns the sharding of the KV state: `of_pages`, and tables and lengths whole."""
        whole: Any = WHOLE

        def of(store: Store) -> Store:
            parts: Any = self.of_pages(store.layout)
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
    def mesh(self) -> Mesh:
        return Mesh(np.array(self.devices), (TENSOR,))


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
            outputs = function(*given, axis=TENSOR, **static)
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


def place(
    spec: ModelSpec,
    layout: Layout,
    devices: Sequence[jax.Device],
    size: Any = 1,
    *,
    context: Any = 1,
    by_expert: bool = False,
) -> Placement:
    """Takes the first `size` of the devices, each with its part of the model. context: as many to
    divide the tokens of latent attention's pages too, 1 to leave these whole. by_expert: a device
    has some routed experts and all of each, not a part of each.

    Raises: ValueError if there are fewer, or the model's heads, feed-forward dimension or experts
    have no such parts, or there is nothing that is to be divided; NotImplementedError for entries
    of several tokens.
    """
    if not is_int(size) or not 1 <= size <= len(devices):
        raise ValueError(
            f"tensor_parallel_size: expected 1 to {len(devices)}, the devices here, got {size!r}"
        )
    _check_context(spec, size, context)
    leaves = [one for leaves in (layout.top, *layout.layers) for one in leaves.items()]
    routed = {name for name, leaf in leaves if by_expert and _is_routed(name, leaf)}
    if by_expert and not routed:
        raise ValueError("enable_expert_parallel: expected False for a model without experts")
    states = tuple(tuple(map(_state_parts, state.arrays)) for state in spec.states)
    if size == 1:
        return Placement((devices[0],), states=states)
    groups = [group for group in spec.groups if group.layers]
    lengths = {("attention heads", group.num_heads or spec.num_heads) for group in groups}
    lengths |= {("KV heads", one.num_kv_heads) for one in groups if one.latent_dim is None}
    if any(differential.FIRST[0] in own for own in layout.layers):
        lengths.add(("pairs of attention heads", spec.num_heads // 2))
    if spec.attention.output_groups > 1:
        lengths.add(("groups of attention heads", spec.attention.output_groups))
    for name, leaf in leaves:
        if name in routed:
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
            # Of more devices than KV heads each would have a copy of one (`with_copies`).
            expected = "a divisor or a multiple" if what == "KV heads" and size % length else ""
            raise ValueError(
                f"tensor_parallel_size: expected {expected or 'a divisor'} of the model's {length} "
                f"{what}, got {size}"
            )
    divided = {*MUST_DIVIDE, "vocab"} if spec.vocab_size % size == 0 else {*MUST_DIVIDE}
    axes = [
        (name, tuple(axis if axis in divided else None for axis in leaf.info.logical_axes))
        for name, leaf in leaves
        if name not in routed
    ]
    axes += [(name, EXPERTS) for name in sorted(routed)]
    axes.append(("k_affine", ("kv_heads",)))
    return Placement(tuple(devices[:size]), tuple(axes), states, divides_tokens=context > 1)


def _is_routed(name: str, leaf: Leaf) -> bool:
    """Tells a routed expert's MLP from heads that are chosen (`models.attention_experts`)."""
    return name.startswith(EXPERT) and {"heads", "kv_heads"}.isdisjoint(leaf.info.logical_axes)


def _check_context(spec: ModelSpec, size: int, context: Any) -> None:
    """Raises: as `place`."""
    if not is_int(context) or context not in (1, size):
        raise ValueError(
            f"decode_context_parallel_size: expected 1 or tensor_parallel_size {size}, got "
            f"{context!r}"
        )
    if context == 1:
        return
    expected = f"decode_context_parallel_size: expected 1, got {context},"
    if not any(group.layers and group.latent_dim for group in spec.groups):
        raise ValueError(
            f"{expected} for a model without latent attention, whose pages are divided by heads"
        )
    if not isinstance(spec.attention.index, IndexSpec | None) or spec.attention.near:
        raise NotImplementedError(f"{expected} for a model that makes one entry of several tokens")


KEY_LEAVES = {"k", "v", "k_bias", "v_bias", "k_norm", "k_norm_bias"}
"""Arrays with a part for each KV head, all that most models have."""


def with_copies(spec: ModelSpec, layout: Layout, size: Any) -> tuple[ModelSpec, Layout]:
    """Returns the model with so many copies of each KV head that each of `size` devices has one;
    as it is where they have some without, or it keeps more of each KV head than keys and values.

    The query heads of a KV head attend to its copies in turn, each to one, so results are the same.
    """
    numbers = [_num_copies(group, size) for group in spec.groups]
    kinds = [spec.layers_of(kind) for kind in range(len(layout.layers))]
    if max(numbers) == 1 or layout.also:
        return spec, layout
    found = []
    for layers, leaves in zip(kinds, layout.layers, strict=True):
        divided = {name for name, leaf in leaves.items() if "kv_heads" in leaf.info.logical_axes}
        if not divided:
            found.append(leaves)
            continue
        group, _ = spec.group_of(layers[0])
        if not divided <= KEY_LEAVES:
            return spec, layout
        heads, copies = spec.groups[group].num_kv_heads, numbers[group]
        copied = {name: leaves[name].copied(heads, copies) for name in divided if copies > 1}
        found.append({**leaves, **copied})
    groups = [
        replace(group, num_kv_heads=group.num_kv_heads * copies)
        for group, copies in zip(spec.groups, numbers, strict=True)
    ]
    return replace(spec, groups=tuple(groups)), replace(layout, layers=tuple(found))


def _num_copies(group: KVGroup, size: Any) -> int:
    """Returns how many copies of each KV head so many devices need."""
    heads = group.num_kv_heads
    is_plain = group.layers and group.latent_dim is None and not group.has_index_key
    return size // heads if is_plain and is_int(size) and size > heads and not size % heads else 1


def _state_parts(array: StateArray) -> PartitionSpec:
    """Returns how a pool of such states, with layers and slots in front, is divided."""
    return WHOLE if array.axis is None else PartitionSpec(*[None] * (array.axis + 1), TENSOR)


def bytes_per_device(tree: Any) -> int:
    """Counts what the arrays of a tree take on one of their devices."""

    def of(x: Any) -> int:
        sharding = getattr(x, "sharding", None)
        shape = x.shape if sharding is None else sharding.shard_shape(x.shape)
        return num_bytes(shape, x.dtype)

    return sum(map(of, jax.tree.leaves(tree)))
