"""Gives layers of a decoder a recurrent mixer, in place of attention or beside it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

from jaxkv.models.families.base import Layout, Leaf, Part, leaf
from jaxkv.models.recurrent import Mixer
from jaxkv.models.spec import NO_KEYS, ModelSpec, StateSpec

ATTENTION = ("q", "k", "v", "o", "q_norm", "k_norm", "attn_gate")
LATENT = ("q_down", "q_down_norm", "kv_down", "kv_down_norm", "k_up", "v_up")
INDEX = "index_"
"""Names of what chooses keys begin so."""


def with_mixer(
    read: tuple[ModelSpec, Layout],
    layers: Collection[int],
    mixer: Mixer,
    leaves: Mapping[str, Leaf],
    *,
    beside: bool = False,
) -> tuple[ModelSpec, Layout]:
    """Returns a decoder of which some layers mix tokens by a recurrence.

    leaves: the arrays of such a layer's mixer. beside: the layers attend as well, and what both
    give is added up.
    """
    spec, layout = with_leaves(
        read, layers, lambda own: {**(own if beside else without_attention(own)), **leaves}
    )
    groups = spec.groups
    if not beside:
        cut = [[one for one in group.layers if one not in layers] for group in groups]
        pairs = zip(groups, cut, strict=True)
        groups = tuple(replace(group, layers=tuple(left)) for group, left in pairs if left)
        groups = groups or (NO_KEYS,)
    state = StateSpec(layers=tuple(sorted(layers)), mixer=mixer)
    states = (*spec.states, state) if layers else spec.states
    return replace(spec, groups=groups, states=states), layout


def with_leaves(
    read: tuple[ModelSpec, Layout],
    layers: Collection[int],
    change: Callable[[Mapping[str, Leaf]], Mapping[str, Leaf]],
) -> tuple[ModelSpec, Layout]:
    """Returns a decoder of which some layers have other arrays, which are kinds of their own."""
    spec, layout = read
    before = spec.layer_kinds or (0,) * spec.num_layers
    kinds = [(kind, layer in layers) for layer, kind in enumerate(before)]
    listed = list(dict.fromkeys(kinds))
    made = (
        change(layout.layers[kind]) if is_changed else layout.layers[kind]
        for kind, is_changed in listed
    )
    layer_kinds = tuple(map(listed.index, kinds)) if len(listed) > 1 else ()
    return replace(spec, layer_kinds=layer_kinds), replace(layout, layers=tuple(made))


def without_attention(leaves: Mapping[str, Leaf]) -> dict[str, Leaf]:
    """Returns the arrays of a layer but for those of its attention."""
    own = (*ATTENTION, *LATENT)
    names = {*own, *(f"{name}_bias" for name in own), "sinks"}
    return {
        name: one
        for name, one in leaves.items()
        if name not in names and not name.startswith(INDEX)
    }


def rows_of(
    source: str,
    sizes: Mapping[str, int],
    width: int,
    axes: Mapping[str, str | None],
    *,
    num_blocks: int = 1,
) -> dict[str, Leaf]:
    """Describes matrices [size, width] whose rows one tensor has, one behind the other, each with
    its logical axis: what devices divide of each is theirs. num_blocks: the tensor has so many
    blocks, each with an equal part of every matrix.
    """
    total, start, found = sum(sizes.values()), 0, {}
    for name, size in sizes.items():
        stop = start + size // num_blocks
        part = Part(shape=(total, width), num_blocks=num_blocks, start=start, stop=stop)
        found[name] = leaf(source, (size, width), (axes[name], "model"), part=part)
        start = stop
    return found
