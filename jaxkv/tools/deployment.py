"""An engine on chips that are not here: the blueprint that `LLM` would make of a model by its
config.json alone, and what those chips have.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from jaxkv.build.blueprint import Blueprint, make_blueprint
from jaxkv.build.memory import Memory
from jaxkv.build.options import EngineOptions
from jaxkv.build.speculation import check_draft, draft_options, own_predictor, read_draft
from jaxkv.models.families import CONFIG, QUANTISATION, ConfigReader, read_config, read_family
from jaxkv.tools.chips import GIB, Target
from jaxkv.weights.hub import resolve_model


def find_config(model: str | os.PathLike[str]) -> ConfigReader:
    """Returns the config.json of a model: the file itself, its directory's, or that of a hub id (of
    which nothing is fetched but this and what may be beside it about quantised weights).

    Raises: CheckpointError if there is none, OSError if the hub does not give it.
    """
    path = Path(os.path.expanduser(os.fspath(model)))
    if path.suffix == ".json":
        return read_config(path.parent, path.name)
    return read_config(resolve_model(model, only=(CONFIG, QUANTISATION)))


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """Holds a blueprint whose devices are only counted, and the chips that they stand for. `name`
    says where the model's config is.
    """

    name: str
    target: Target
    blueprint: Blueprint

    @property
    def memory(self) -> Memory:
        """Returns the memory of one device, with the weights loaded."""
        utilization = self.blueprint.options.gpu_memory_utilization
        usable = int(self.target.chip.memory_gib * GIB)
        source = f"{utilization} of {self.target.chip.memory_gib} GiB of each device"
        memory = Memory(
            limit=int(usable * utilization), used=self.blueprint.weight_bytes, source=source
        )
        return memory.with_states(self.blueprint.state_nbytes)

    @cached_property
    def compilable(self) -> Blueprint:
        """Returns the blueprint on devices that a compiler makes programs for.

        Raises: RuntimeError if the target's compiler is not installed.
        """
        return self.blueprint.on(self.target.devices())


def deploy(
    model: str | os.PathLike[str],
    target: Target,
    *,
    dtype: str = "bfloat16",
    tensor_parallel_size: int | None = None,
    **others: Any,
) -> Deployment:
    """Returns what `LLM` would build of a model on a target.

    tensor_parallel_size: by default all devices of the target. others: any more of `LLM`'s options.
    Raises: ValueError and NotImplementedError as `LLM` does, CheckpointError and OSError as
    `find_config` does.
    """
    config = find_config(model)
    spec, layout = read_family(config)
    if dtype not in ("bfloat16", "float32"):
        raise ValueError(f"dtype: expected bfloat16 or float32, got {dtype!r}")
    size = target.num_devices if tensor_parallel_size is None else tensor_parallel_size
    options = EngineOptions(model, dtype=dtype, tensor_parallel_size=size, **others)
    devices, draft = target.counted_devices(), None
    drafting = draft_options(options, spec)
    if drafting is not None and drafting.model is not None:
        own, own_layout = own_predictor(options, spec, layout) or read_draft(
            find_config(drafting.model), options=options, spec=spec, layout=layout
        )
        check_draft(own, drafting, spec)
        draft = make_blueprint(drafting, own, own_layout, devices, keeps_all=True)
    blueprint = make_blueprint(options, spec, layout, devices, draft=draft)
    return Deployment(name=config.where, target=target, blueprint=blueprint)
