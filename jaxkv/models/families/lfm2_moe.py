"""LFM2 with experts. Source: transformers' Lfm2Moe."""

from __future__ import annotations

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import Layout
from jaxkv.models.families.experts import MAX_EXPERTS, Experts, first_dense, read_router
from jaxkv.models.families.lfm2 import read_lfm2
from jaxkv.models.spec import ModelSpec


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    count = config.size("num_experts", at_most=MAX_EXPERTS)
    experts = Experts(
        count=count,
        width=config.size("moe_intermediate_size"),
        router="feed_forward.gate",
        one="feed_forward.experts.{expert}.",
        gate="w1",
        up="w3",
        down="w2",
        bias="feed_forward.expert_bias" if config.flag("use_expert_bias", True) else None,
    )
    return read_lfm2(
        config,
        experts=experts.leaves,
        is_dense=first_dense(config, "num_dense_layers"),
        router=read_router(
            config,
            count,
            used="num_experts_per_tok",
            score="sigmoid",
            is_normalised=config.flag("norm_topk_prob", True),
            scale=config.number("routed_scaling_factor", 1.0),
        ),
    )
