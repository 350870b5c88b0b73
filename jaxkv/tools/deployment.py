"""An engine that is not there: a model by its config.json alone, an engine's limits, and chips to
run it on.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from jaxkv.build.codecs import describe_codecs, exact_layers, group_codecs
from jaxkv.build.memory import Memory
from jaxkv.build.pool import (
    Codecs,
    abstract_kv,
    bytes_per_page,
    bytes_with_low,
    fits_keys,
    with_policy,
)
from jaxkv.config import EngineConfig, engine_limits
from jaxkv.kv.policies import asks_backend, get_policy
from jaxkv.models.decoder import heads_of
from jaxkv.models.families import ConfigReader, Layout, Leaf, read_config, read_family
from jaxkv.models.spec import ModelSpec
from jaxkv.ops.attention import Needs, choose_backend
from jaxkv.placement import TENSOR, Placement, place
from jaxkv.programs.compiled import Programs
from jaxkv.tools.chips import GIB, Target
from jaxkv.weights.dummy import weight_shapes
from jaxkv.weights.hub import resolve_model
from jaxkv.weights.tree import Weights, with_layer_leaf


def find_config(model: str | os.PathLike[str]) -> ConfigReader:
    """The config.json of a model: the file itself, its directory, or a hub id (nothing else is
    fetched).

    Raises: CheckpointError if there is none, OSError if the hub does not give it.
    """
    path = Path(os.path.expanduser(os.fspath(model)))
    if path.suffix == ".json":
        return read_config(path.parent, path.name)
    return read_config(resolve_model(model, only=("config.json",)))


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """What `LLM` would make of a model with these limits on a target. Allocates nothing."""

    name: str
    spec: ModelSpec
    layout: Layout
    dtype: str
    codecs: Codecs
    target: Target
    tensor_parallel_size: int
    limits: EngineConfig
    backend: str
    backend_reason: str
    utilization: float

    @property
    def memory(self) -> Memory:
        """Of one device, with the weights loaded."""
        usable = int(self.target.chip.memory_gib * GIB)
        source = f"{self.utilization} of {self.target.chip.memory_gib} GiB of each device"
        return Memory(limit=int(usable * self.utilization), used=self.weight_bytes, source=source)

    @property
    def weight_bytes(self) -> int:
        """On each device."""
        itemsize, placement = jnp.dtype(self.dtype).itemsize, self._parts
        total = 0
        for leaves, count in ((self._top, 1), (self.layout.layer, self.spec.num_layers)):
            for name, leaf in leaves.items():
                is_divided = TENSOR in placement.weight(name, len(leaf.info.shape))
                nbytes = count * math.prod(leaf.info.shape) * itemsize
                total += nbytes // (self.tensor_parallel_size if is_divided else 1)
        return total

    @property
    def _top(self) -> dict[str, Leaf]:
        """Leaves outside the layers, without a tied head."""
        return {name: leaf for name, leaf in self.layout.top.items() if leaf.same_as is None}

    @property
    def kv_cache_dtype(self) -> str:
        return describe_codecs(self.spec, self.codecs)

    @property
    def page_nbytes(self) -> int:
        """On each device."""
        made: Any = {"backend": self.backend, "num_devices": self.tensor_parallel_size}
        return bytes_with_low(self.limits, self.spec, self.codecs, **made)

    @property
    def token_nbytes(self) -> int:
        """Of the KV cache, on all devices together."""
        made: Any = {
            "codecs": self.codecs,
            "backend": self.backend,
            "num_devices": self.tensor_parallel_size,
        }
        nbytes = bytes_per_page(self.spec, page_size=self.limits.block_size, **made)
        return nbytes * self.tensor_parallel_size // self.limits.block_size

    def sequence_nbytes(self, context: int) -> int:
        """Of the KV cache of so many tokens, or of what its policy leaves, on all devices
        together.
        """
        row = self.limits.row_pages * self.limits.block_size
        if not row or context <= row:
            return context * self.token_nbytes
        return self.limits.row_pages * self.page_nbytes * self.tensor_parallel_size

    @cached_property
    def placement(self) -> Placement:
        """Raises: RuntimeError if the target's compiler is not installed."""
        return place(self.spec, self.layout, self.target.devices(), self.tensor_parallel_size)

    @property
    def _parts(self) -> Placement:
        """How the model is divided, on devices that are only counted."""
        return place(self.spec, self.layout, _counted(self.target), self.tensor_parallel_size)

    def programs_for(self, config: EngineConfig, num_pages: int) -> Programs:
        """Of an engine whose pool has so many pages, not compiled; the rest is in the config."""
        spec, backend, placement = self.spec, self.backend, self.placement
        sized = replace(config, num_pages=num_pages)
        kv = abstract_kv(spec, sized, self.codecs, backend=backend, placement=placement)
        weights = weight_shapes(spec, self.layout, dtype=self.dtype, placement=placement)
        if fits_keys(self.limits, self.codecs):
            weights = self._with_affine(weights, placement)
        return Programs(weights, kv, spec=spec, config=config, backend=backend, placement=placement)

    def _with_affine(self, weights: Weights, placement: Placement) -> dict[str, Any]:
        """With the leaf that an engine of this codec adds (`programs.fit_keys`)."""
        (group, *_), num_layers = self.spec.groups, self.spec.num_layers
        shape = (num_layers, group.num_kv_heads * 2 * group.head_dim)
        parts = placement.weight("k_affine", len(shape))
        leaf = placement.abstract(shape, jnp.float32, parts)
        return with_layer_leaf(weights, "k_affine", leaf)


def _counted(target: Target) -> Any:
    return range(target.num_devices)


def deploy(
    model: str | os.PathLike[str],
    target: Target,
    *,
    dtype: str = "bfloat16",
    kv_cache_dtype: str = "auto",
    kv_cache_dtype_skip_layers: Any = None,
    kv_policy: str = "full",
    kv_budget: int | None = None,
    tensor_parallel_size: int | None = None,
    backend: str = "auto",
    utilization: float = 0.9,
    **limits: Any,
) -> Deployment:
    """limits: those of `engine_limits`. tensor_parallel_size: by default all devices of the target.

    Raises: ValueError and NotImplementedError as `LLM` does, CheckpointError and OSError as
    `find_config` does.
    """
    config = find_config(model)
    spec, layout = read_family(config)
    if dtype not in ("bfloat16", "float32"):
        raise ValueError(f"dtype: expected bfloat16 or float32, got {dtype!r}")
    if not 0 < utilization <= 1:
        raise ValueError(
            f"gpu_memory_utilization: expected a number in (0, 1], got {utilization!r}"
        )
    size = target.num_devices if tensor_parallel_size is None else tensor_parallel_size
    place(spec, layout, _counted(target), size)
    spec = spec.apart(exact_layers(spec, kv_cache_dtype_skip_layers))
    codecs = group_codecs(
        spec, kv_cache_dtype, kv_cache_dtype_skip_layers, platform="tpu", dtype=dtype
    )
    engine = engine_limits("tpu", spec.max_len, **limits)
    needs = partial(
        Needs,
        page_size=engine.block_size,
        num_rows=engine.max_num_seqs,
        pages_per_row=engine.pages_per_row,
        platform="tpu",
        kv_policy=kv_policy if asks_backend(get_policy(kv_policy)) else None,
    )
    chosen, reason = choose_backend(
        backend, heads_of(spec, num_devices=size), [needs(codec=codec) for codec in codecs]
    )
    engine = with_policy(
        engine, kv_policy, kv_budget, codecs, spec, backend=chosen, num_devices=size
    )
    return Deployment(
        name=config.where,
        spec=spec,
        layout=layout,
        dtype=dtype,
        codecs=codecs,
        target=target,
        tensor_parallel_size=size,
        limits=engine,
        backend=chosen,
        backend_reason=reason,
        utilization=utilization,
    )
