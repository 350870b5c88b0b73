"""Granite 4 hybrid: Mamba2, and attention in a few layers, with or without experts. Source:
transformers' GraniteMoeHybrid.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import FULL, LAYER, LLAMA, Layout, attn_biased, read_decoder
from jaxkv.models.families.delta import LINEAR
from jaxkv.models.families.experts import read_router
from jaxkv.models.families.granite import scales
from jaxkv.models.families.granitemoe import read_experts
from jaxkv.models.families.granitemoeshared import with_shared
from jaxkv.models.families.hybrid import with_mixer
from jaxkv.models.families.ssm import OLD_NAMES, read_bamba_mixer
from jaxkv.models.spec import AttentionSpec, ModelSpec, RopeSpec

DENSE = replace(LLAMA, gate_up="shared_mlp.input_linear", down="shared_mlp.output_linear")


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    num_layers = config.num_layers
    kinds = config.kinds("layer_types", num_layers, (FULL, LINEAR, *OLD_NAMES))
    mixer, leaves = read_bamba_mixer(config, f"{LAYER}mamba.", norm_eps=1e-6)
    layers = [layer for layer, kind in enumerate(kinds) if OLD_NAMES.get(kind, kind) == LINEAR]
    return with_mixer(_read_decoder(config, num_layers), layers, mixer, leaves)


def _read_decoder(config: ConfigReader, num_layers: int) -> tuple[ModelSpec, Layout]:
    position = config.get("position_embedding_type")
    if position not in (None, "nope", "rope"):
        raise config.fail("position_embedding_type", "null, nope or rope")
    ropes: Sequence[RopeSpec | None] | None = None if position == "rope" else [None] * num_layers
    mixture: dict[str, Any] = {}
    names = LLAMA
    if config.get("num_local_experts") in (None, 0):
        names = DENSE
        config = config.replaced(intermediate_size=config.size("shared_intermediate_size"))
    else:
        experts = with_shared(config, read_experts(config))
        router = read_router(config, experts.count, used="num_experts_per_tok", of_chosen=True)
        mixture = {"experts": experts.leaves, "router": router}
    return read_decoder(
        config,
        names=names,
        biased=attn_biased(config),
        ropes=ropes,
        attention=AttentionSpec(scale=config.number("attention_multiplier", 1.0)),
        scales=scales(config),
        **mixture,
    )
