"""Phi-3 and Phi-4: Llama with fused weights, a rotary embedding stretched by longrope, partly
rotated heads. Source: arXiv 2404.14219, 2503.01743.
"""

from __future__ import annotations

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import Layout, Names, mistral_kinds, read_decoder
from jaxkv.models.rope_config import rope_section
from jaxkv.models.spec import ModelSpec


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    rope = rope_section(config).values
    if rope.get("rope_type", rope.get("type")) == "yarn":  # what early files call longrope
        rope = {**rope, "rope_type": "longrope"}
        config = config.replaced(rope_parameters=rope, rope_scaling=None)
    return read_decoder(
        config,
        partly=True,
        names=Names(qkv="self_attn.qkv_proj", gate_up="mlp.gate_up_proj"),
        kinds=mistral_kinds(config),
    )
