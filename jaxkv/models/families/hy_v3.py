"""Hunyuan 3: Qwen3's attention with experts by sigmoid scores and a bias. Source: the model's card,
tencent/Hy3-preview.
"""

from __future__ import annotations

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import QK_NORMED, Layout, attn_biased, read_decoder
from jaxkv.models.families.experts import MAX_EXPERTS, Experts, listed_dense, read_router
from jaxkv.models.spec import ModelSpec


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    config.refuse("mlp_bias", False)
    count = config.size("num_experts", at_most=MAX_EXPERTS)
    width = config.size("moe_intermediate_size")
    experts = Experts(
        count=count,
        width=width,
        router="mlp.router.gate",
        bias="mlp.expert_bias",
        shared="mlp.shared_mlp.",
        shared_width=config.size("num_shared_experts", 1) * width,
    )
    return read_decoder(
        config,
        names=QK_NORMED,
        biased=attn_biased(config),
        experts=experts.leaves,
        is_dense=listed_dense(config, (0,)),
        router=read_router(
            config,
            count,
            used="num_experts_per_tok",
            score="sigmoid",
            is_normalised=True,
            scale=config.number("router_scaling_factor", 1.0),
        ),
    )
