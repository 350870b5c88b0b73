"""Makes weight trees of arrays that a program has, in place of a checkpoint's files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.axes import Array
from jaxkv.errors import CheckpointError
from jaxkv.models.families import Layout
from jaxkv.models.spec import ModelSpec
from jaxkv.weights.load import (
    Kept,
    aligned_empty,
    check_below,
    dtypes_of,
    is_finite,
    load_weights,
)
from jaxkv.weights.safetensors import in_host_memory
from jaxkv.weights.tree import LAYERS, TreeLeaf, make_tree, tree_leaves

BITS = np.dtype(np.uint16)


def take_weights(
    tree: Mapping[str, Any], spec: ModelSpec, layout: Layout, kept: Kept
) -> dict[str, Any]:
    """Returns what `load_weights` gives, of numpy or jax arrays: under a checkpoint's names, in
    dicts that may be nested at every dot, or in the tree of `weights.tree`, where each is whole
    and not quantised. All are copied.

    Raises: ValueError for what is no such tree, CheckpointError as `load_weights` does.
    """
    arrays = flat(tree)
    is_own = "embed" in arrays and any(name.startswith(f"{LAYERS}.") for name in arrays)
    if not is_own:
        return load_weights(arrays, spec, layout, kept)
    leaves = [
        leaf
        for leaf in tree_leaves(spec, layout)
        if leaf.path in arrays or leaf.one.same_as is None
    ]
    _check(arrays, leaves, spec.family)

    def put_one(leaf: TreeLeaf) -> dict[str, Array]:
        given, packing = arrays[leaf.path], kept.packing(leaf)
        if isinstance(given, jax.Array):
            is_plain = packing is None and leaf.one.info.below is None
            if is_plain and (found := kept.filled(leaf, [given])) is not None:
                return found
        if packing is None:
            return kept.put(copied(given, leaf, leaf.kept_as(kept.dtype)), leaf)
        # All of them in float32 at once would take twice what is given in bfloat16.
        matrices = (given[place] for place in np.ndindex(given.shape[:-2]))
        floats = (copied(w_FD, leaf, np.dtype(np.float32)) for w_FD in matrices)
        return kept.put_packed(kept.quantised(floats, leaf.shape, packing), leaf)

    def copied(given: np.ndarray | jax.Array, leaf: TreeLeaf, dtype: np.dtype[Any]) -> np.ndarray:
        given = in_host_memory(given) if isinstance(given, jax.Array) else given
        given = given.view(jnp.bfloat16) if given.dtype == BITS else given
        host = aligned_empty(given.shape, dtype)
        with np.errstate(over="ignore", invalid="ignore"):  # what does not fit is named below
            host[...] = given
        if kept.check:
            check_below(f"weights: {leaf.path}", given, leaf.one.info.below)
        if kept.check and not is_finite(host):
            raise CheckpointError(
                f"weights: {leaf.path}: expected finite values as {leaf.kept_as(kept.dtype)}, got "
                'NaN or infinity; with load_format="unchecked" nobody looks'
            )
        return host

    return make_tree((leaf, put_one(leaf)) for leaf in leaves)


def flat(tree: Mapping[str, Any]) -> dict[str, np.ndarray | jax.Array]:
    """Returns the arrays of a tree by their paths. Raises: ValueError for anything else in it."""
    found: dict[str, np.ndarray | jax.Array] = {}

    def take(prefix: str, branch: Mapping[str, Any]) -> None:
        for key, value in branch.items():
            if not isinstance(key, str):
                raise ValueError(f"weights: expected texts as names, got {key!r:.80}")
            name = prefix + key
            if isinstance(value, Mapping):
                take(f"{name}.", value)
                continue
            dtype = getattr(value, "dtype", None)
            is_array = isinstance(value, np.ndarray | jax.Array)
            if not is_array or not isinstance(dtype, np.dtype) or dtype.hasobject:
                got = f"{type(value).__name__}{f' of {dtype}' if is_array else ''}"
                raise ValueError(
                    f"weights: {name}: expected a numpy or jax array, got {got}; "
                    "jax.numpy.from_dlpack makes one of another library's tensor"
                )
            if isinstance(value, jax.Array) and value.is_deleted():
                raise ValueError(f"weights: {name}: expected an array, got one that was deleted")
            if name in found:
                raise ValueError(f"weights: expected one array {name}, got two")
            found[name] = value if isinstance(value, jax.Array) else np.asarray(value)

    try:
        take("", tree)
    except RecursionError as error:
        raise ValueError("weights: expected a tree, got dicts within dicts without end") from error
    return found


def _check(
    arrays: Mapping[str, np.ndarray | jax.Array], leaves: list[TreeLeaf], family: str
) -> None:
    """Raises: CheckpointError naming every missing, unexpected or misshapen array."""
    known = {leaf.path: leaf for leaf in leaves}
    problems = [f"missing array {path}" for path in known if path not in arrays]
    problems += [f"array that {family} does not use: {path}" for path in arrays.keys() - known]
    for path, array in arrays.items():
        if path not in known:
            continue
        leaf = known[path]
        kinds, is_bits = dtypes_of(leaf.one.info), array.dtype == BITS
        if array.shape != leaf.shape:
            problems.append(f"{path}: expected shape {leaf.shape}, got {array.shape}")
        elif array.dtype.name not in kinds and (not is_bits or leaf.one.info.below is not None):
            problems.append(f"{path}: expected one of {', '.join(kinds)}, got {array.dtype.name}")
    if problems:
        what_to_do = "give the arrays of a tree of the same model"
        raise CheckpointError.of("weights", sorted(problems), what_to_do)
