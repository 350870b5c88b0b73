"""Flint: Qwen3 MoE with attention sinks, which rotates within windows only, and experts by sigmoid
scores beside one for all tokens. Source: the model's card, RecursiveSI/flint.
"""

from __future__ import annotations

from dataclasses import replace

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import (
    FULL,
    LAYER,
    QK_NORMED,
    SLIDING,
    Layout,
    attn_biased,
    leaf,
    read_decoder,
)
from jaxkv.models.families.experts import qwen_dense, read_router
from jaxkv.models.families.qwen3_moe import read_experts
from jaxkv.models.rope_config import read_rope
from jaxkv.models.spec import AttentionSpec, ModelSpec


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    if config.get("mlp_only_layers") is None:
        config = config.replaced(mlp_only_layers=[0, 1])
    kinds = _kinds(config)
    rope = read_rope(config)
    experts = replace(
        read_experts(config),
        shared="mlp.shared_expert.",
        shared_width=config.size("shared_expert_intermediate_size"),
    )
    spec, layout = read_decoder(
        config,
        names=QK_NORMED,
        biased=attn_biased(config),
        kinds=kinds,
        ropes=[rope if kind == SLIDING else None for kind in kinds],
        attention=AttentionSpec(has_sinks=True),
        experts=experts.leaves,
        is_dense=qwen_dense(config),
        router=read_router(
            config,
            experts.count,
            used="num_experts_per_tok",
            score="sigmoid",
            is_normalised=config.flag("norm_topk_prob", True),
        ),
    )
    source = f"{LAYER}self_attn.softmax_offset"
    layout = layout.in_each_layer(sinks=leaf(source, (spec.num_heads,), ("heads",)))
    spellings = ((r"\.self_attn\.sinks$", ".self_attn.softmax_offset"),)
    return spec, replace(layout, spellings=spellings)


def _kinds(config: ConfigReader) -> list[str]:
    """Reads each layer's kind; without a list the first two, every fourth and the last see all."""
    num_layers = config.num_layers
    full = [i < 2 or i % 4 == 1 or i == num_layers - 1 for i in range(num_layers)]
    otherwise = [FULL if one else SLIDING for one in full]
    return config.kinds("layer_types", num_layers, (FULL, SLIDING), otherwise)
