"""Names what an engine's keys and values are of, for files that keep them."""

from __future__ import annotations

import jax
import numpy as np

from jaxkv.build.blueprint import Blueprint
from jaxkv.build.model import Model
from jaxkv.kv.saved import Origin, fingerprint


def origin_of(model: Model, blueprint: Blueprint, form: str) -> Origin:
    """Returns the origin of what this engine stores in this form. Cost: reads the first row of
    every matrix of the weights, by which models of one shape are told apart.
    """
    tokenizer = model.tokenizer
    words = [] if tokenizer is None else sorted(tokenizer.get_vocab().items())
    return Origin(
        model=fingerprint([repr(blueprint.spec.joined()).encode()]),
        weights=fingerprint([_sample(leaf) for leaf in jax.tree.leaves(model.weights)]),
        tokenizer=fingerprint([repr(words).encode()]) if words else "",
        dtype=blueprint.dtype,
        codec=blueprint.kv_cache_dtype,
        form=form,
        page_size=blueprint.limits.block_size,
    )


def _sample(leaf: jax.Array) -> bytes:
    return np.asarray(leaf[..., 0, :] if leaf.ndim > 1 else leaf).tobytes()
