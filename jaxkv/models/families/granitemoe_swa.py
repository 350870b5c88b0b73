"""Granite MoE with windows: attention sinks, and a rotary base of each layer's own. Source: the
model's card, ibm-granite/granite-swash-3b-a600m.
"""

from __future__ import annotations

from dataclasses import replace

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families import granite_swa
from jaxkv.models.families.base import Layout
from jaxkv.models.families.experts import read_router
from jaxkv.models.families.granitemoe import read_experts
from jaxkv.models.families.granitemoeshared import with_shared
from jaxkv.models.spec import ModelSpec

PREFIX = "block_sparse_moe."


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    experts = replace(
        read_experts(config),
        router=f"{PREFIX}router",
        fused=(f"{PREFIX}experts.gate_up_proj", f"{PREFIX}experts.down_proj"),
    )
    return granite_swa.read(
        config,
        experts=with_shared(config, experts).leaves,
        router=read_router(config, experts.count, used="num_experts_per_tok", of_chosen=True),
    )
