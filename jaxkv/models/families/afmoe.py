"""AFMoE (Trinity): gated attention that rotates within windows only, norms on both sides, experts
by sigmoid scores. Source: the model's card, arcee-ai/Trinity-Mini.
"""

from __future__ import annotations

from dataclasses import replace

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import (
    LAYER,
    QK_NORMED,
    SLIDING,
    Layout,
    attn_biased,
    leaf,
    read_decoder,
    read_kinds,
)
from jaxkv.models.families.experts import MAX_EXPERTS, Experts, first_dense, read_router
from jaxkv.models.rope_config import read_rope
from jaxkv.models.spec import ModelSpec, Scales

NAMES = replace(
    QK_NORMED,
    post_attn_norm="post_attention_layernorm",
    mlp_norm="pre_mlp_layernorm",
    post_mlp_norm="post_mlp_layernorm",
)


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    hidden = config.size("hidden_size")
    kinds = read_kinds(config, every=config.size("global_attn_every_n_layers", 4))
    rope = read_rope(config)
    count = config.size("num_experts", at_most=MAX_EXPERTS)
    width = config.size("moe_intermediate_size")
    experts = Experts(
        count=count,
        width=width,
        router="mlp.router.gate",
        bias="mlp.expert_bias",
        shared="mlp.shared_experts.",
        shared_width=config.size("num_shared_experts", 1) * width,
    )
    spec, layout = read_decoder(
        config,
        names=NAMES,
        biased=attn_biased(config),
        kinds=kinds,
        ropes=[rope if kind == SLIDING else None for kind in kinds],
        scales=Scales(embed=hidden**0.5 if config.flag("mup_enabled", False) else 1.0),
        experts=experts.leaves,
        is_dense=first_dense(config, "num_dense_layers"),
        router=read_router(
            config,
            count,
            used="num_experts_per_tok",
            score="sigmoid",
            is_normalised=True,
            scale=config.number("route_scale", 1.0),
        ),
    )
    source = f"{LAYER}self_attn.gate_proj.weight"
    shape = (spec.num_heads * spec.head_dim, hidden)
    return spec, layout.in_each_layer(attn_gate=leaf(source, shape, ("heads", "model")))
