"""Mellum 2: Qwen3 MoE with windows, which have a rotary embedding of their own. Source: the model's
card, JetBrains/Mellum2-12B-A2.5B-Base.
"""

from __future__ import annotations

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import FULL, QK_NORMED, SLIDING, Layout, attn_biased, read_decoder
from jaxkv.models.families.experts import listed_dense, read_router
from jaxkv.models.families.qwen3_moe import read_experts
from jaxkv.models.rope_config import read_layer_ropes
from jaxkv.models.spec import ModelSpec


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    num_layers = config.num_layers
    kinds = config.kinds("layer_types", num_layers, (FULL, SLIDING), [FULL] * num_layers)
    if not config.section("rope_parameters").values:
        thetas = {FULL: {"rope_theta": 500000.0}, SLIDING: {"rope_theta": 10000.0}}
        config = config.replaced(rope_parameters=thetas)
    ropes = read_layer_ropes(config, kinds)
    experts = read_experts(config)
    is_normalised = config.flag("norm_topk_prob", True)
    return read_decoder(
        config,
        names=QK_NORMED,
        biased=attn_biased(config),
        kinds=kinds,
        ropes=ropes,
        experts=experts.leaves,
        is_dense=listed_dense(config),
        router=read_router(
            config, experts.count, used="num_experts_per_tok", is_normalised=is_normalised
        ),
    )
