"""Names what an engine's keys and values are of, for files that keep them."""

from __future__ import annotations

from typing import Any

import jax
import ml_dtypes
import numpy as np

from jaxkv.build.blueprint import Blueprint
from jaxkv.build.model import Model
from jaxkv.kv.saved import Origin, fingerprint
from jaxkv.weights.tree import Weights, layer_leaf


def origin_of(model: Model, weights: Weights, blueprint: Blueprint, form: str) -> Origin:
    """Returns the origin of what this engine stores in this form. Cost: reads the first row of
    every matrix of the weights, by which models of one shape are told apart.
    """
    tokenizer = model.tokenizer
    keys = layer_leaf(weights, "k_affine")
    named = jax.tree_util.tree_leaves_with_path(weights)
    leaves = [leaf for path, leaf in named if path[-1] != jax.tree_util.DictKey("k_affine")]
    words = [] if tokenizer is None else sorted(tokenizer.get_vocab().items())
    divides = any(x.axis is not None for state in blueprint.spec.states for x in state.arrays)
    return Origin(
        model=fingerprint([repr(blueprint.spec.joined()).encode()]),
        weights=fingerprint([_sample(leaf) for leaf in leaves]),
        tokenizer=fingerprint([repr(words).encode()]) if words else "",
        dtype=blueprint.dtype,
        codec=blueprint.kv_cache_dtype,
        form=form,
        page_size=blueprint.limits.block_size,
        keys="" if keys is None else fingerprint([np.asarray(keys).tobytes()]),
        state_devices=blueprint.num_devices if divides else 0,
    )


def _sample(leaf: jax.Array) -> bytes:
    """Returns some of an array, float32 as bfloat16: an engine in either has the same model."""
    some: Any = np.asarray(leaf[..., 0, :] if leaf.ndim > 1 else leaf)
    return (some.astype(ml_dtypes.bfloat16) if some.dtype == np.float32 else some).tobytes()
