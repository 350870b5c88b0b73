"""Names what an engine's keys and values are of, for files that keep them."""

from __future__ import annotations

import weakref

import jax

from jaxkv.build.blueprint import Blueprint
from jaxkv.build.model import Model
from jaxkv.kv.saved import Origin, fingerprint
from jaxkv.processes import to_host
from jaxkv.programs.digest import digests
from jaxkv.weights.tree import Weights, layer_leaf


class WeightNames:
    """Names weights by all of their values: float32 as bfloat16, since an engine in either has the
    same model. Those of the last call are not read again.
    """

    def __init__(self) -> None:
        self._last: tuple[list[weakref.ref[jax.Array]], str] = [], ""
        """The arrays, which are not kept for this, and their name."""

    def of(self, weights: Weights) -> str:
        """Returns the name. Cost: the device reads the weights once."""
        named = jax.tree_util.tree_leaves_with_path(weights)
        leaves = [leaf for path, leaf in named if path[-1] != jax.tree_util.DictKey("k_affine")]
        last, name = self._last
        # All of them: an update may replace a few.
        if len(last) != len(leaves) or any(x() is not y for x, y in zip(last, leaves, strict=True)):
            name = fingerprint([to_host(x).tobytes() for x in digests(leaves)])
            self._last = [weakref.ref(x) for x in leaves], name
        return name


def origin_of(
    model: Model, weights: Weights, blueprint: Blueprint, form: str, names: WeightNames
) -> Origin:
    """Returns the origin of what this engine stores in this form."""
    tokenizer = model.tokenizer
    keys = layer_leaf(weights, "k_affine")
    words = [] if tokenizer is None else sorted(tokenizer.get_vocab().items())
    divides = any(x.axis is not None for state in blueprint.spec.states for x in state.arrays)
    return Origin(
        model=fingerprint([repr(blueprint.spec.joined()).encode()]),
        weights=names.of(weights),
        tokenizer=fingerprint([repr(words).encode()]) if words else "",
        dtype=blueprint.dtype,
        codec=blueprint.kv_cache_dtype,
        form=form,
        page_size=blueprint.limits.block_size,
        keys="" if keys is None else fingerprint([to_host(keys).tobytes()]),
        state_devices=blueprint.num_devices if divides else 0,
    )
