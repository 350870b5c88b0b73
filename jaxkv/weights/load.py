"""From a checkpoint's tensors to the weight tree on the device, without holding the checkpoint
twice.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.axes import Array
from jaxkv.errors import CheckpointError
from jaxkv.models.families import Layout, Leaf
from jaxkv.models.spec import ModelSpec
from jaxkv.placement import Placement
from jaxkv.weights.safetensors import Checkpoint

FLOATS = ("float32", "bfloat16", "float16", "float64")


def load_weights(
    directory: Path,
    spec: ModelSpec,
    layout: Layout,
    *,
    dtype: str,
    as_bits: bool = False,
    placement: Placement | None = None,
) -> dict[str, Any]:
    """The weight tree of `models.decoder`, every tensor as `dtype`, with bfloat16 as raw uint16
    bits if `as_bits`.

    Layers are stacked, or a tuple of trees where they belong to several KV groups. Tensors go one
    by one from the mapped file to the device and their file pages are dropped at once.
    Raises: CheckpointError naming every missing, unexpected or misshapen tensor, before anything is
    allocated.
    """
    with Checkpoint.open(directory) as checkpoint:
        top = _present(checkpoint, layout)
        _check(checkpoint, spec, layout, top)

        def load(name: str, *sources: str, shape: tuple[int, ...]) -> Array:
            host = _stack(checkpoint, sources, shape, jnp.dtype(dtype))
            return put(host.view(np.uint16) if as_bits else host, name, placement)

        def one_layer(i: int) -> dict[str, Array]:
            return {
                name: load(name, leaf.source.format(layer=i), shape=leaf.info.shape)
                for name, leaf in layers.items()
            }

        def all_layers(name: str, leaf: Leaf) -> Array:
            sources = [leaf.source.format(layer=i) for i in range(spec.num_layers)]
            return load(name, *sources, shape=(spec.num_layers, *leaf.info.shape))

        layers = layout.layer
        weights: dict[str, Any] = {
            name: load(name, leaf.source, shape=leaf.info.shape) for name, leaf in top.items()
        }
        if len(spec.groups) == 1:
            weights["layers"] = {name: all_layers(name, leaf) for name, leaf in layers.items()}
        else:
            weights["layers"] = tuple(one_layer(i) for i in range(spec.num_layers))
        return weights


def put(host: np.ndarray, name: str, placement: Placement | None) -> Array:
    """A leaf of the weight tree on its devices, on the default one without a placement."""
    where = None if placement is None else placement.sharding(placement.weight(name, host.ndim))
    return jax.device_put(host, where).block_until_ready()


def _present(checkpoint: Checkpoint, layout: Layout) -> dict[str, Leaf]:
    """The top leaves without those that repeat another one (a tied head: absent, or stored twice
    with equal values).
    """
    top = dict(layout.top)
    for name, leaf in layout.top.items():
        if leaf.same_as is None:
            continue
        original = layout.top[leaf.same_as].source
        if leaf.source not in checkpoint.entries or _equal(checkpoint, leaf.source, original):
            del top[name]
    return top


def _equal(checkpoint: Checkpoint, one: str, other: str) -> bool:
    a, b = checkpoint.entries[one], checkpoint.entries.get(other)
    if b is None or (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    views = [checkpoint.read(name).reshape(-1).view(np.uint8) for name in (one, other)]
    same = all(
        np.array_equal(views[0][i : i + 2**24], views[1][i : i + 2**24])
        for i in range(0, a.nbytes, 2**24)
    )
    checkpoint.release(one)
    checkpoint.release(other)
    return same


def _check(checkpoint: Checkpoint, spec: ModelSpec, layout: Layout, top: dict[str, Leaf]) -> None:
    expected = {leaf.source: leaf.info.shape for leaf in top.values()}
    for layer in range(spec.num_layers):
        expected |= {
            leaf.source.format(layer=layer): leaf.info.shape for leaf in layout.layer.values()
        }
    repeated = {leaf.source for leaf in layout.top.values()} - set(expected)
    entries = checkpoint.entries
    unknown = [
        name
        for name in entries
        if name not in expected
        and name not in repeated
        and not any(re.fullmatch(p, name) for p in layout.derived)
    ]
    problems = [f"missing tensor {name}" for name in expected if name not in entries]
    problems += [f"tensor that {spec.family} does not use: {name}" for name in unknown]
    for name, shape in expected.items():
        entry = entries.get(name)
        if entry is not None and entry.shape != shape:
            problems.append(f"{name}: expected shape {shape} from config.json, got {entry.shape}")
        elif entry is not None and entry.dtype.name not in FLOATS:
            problems.append(f"{name}: expected one of {', '.join(FLOATS)}, got {entry.dtype.name}")
    if problems:
        shown = "; ".join(problems[:10]) + (
            f"; and {len(problems) - 10} more" if len(problems) > 10 else ""
        )
        raise CheckpointError(f"{checkpoint.directory}: {shown}")


def _stack(
    checkpoint: Checkpoint, sources: tuple[str, ...], shape: tuple[int, ...], dtype: np.dtype
) -> np.ndarray:
    """The named tensors in one host array of `shape`, converted as they are copied from the
    file.
    """
    host = aligned_empty(shape, dtype)
    for part, name in zip(host.reshape(len(sources), -1), sources, strict=True):
        part[...] = checkpoint.read(name).reshape(-1)
        checkpoint.release(name)
    return host


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Host memory that a CPU device takes over instead of copying, because it starts at a multiple
    of 64 bytes.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    raw = np.empty(nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + nbytes].view(dtype).reshape(shape)
