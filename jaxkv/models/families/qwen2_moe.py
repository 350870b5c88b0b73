"""Qwen2 MoE: Qwen2 with experts and one shared by all tokens. Source: arXiv 2407.10671, section
2.2.2.
"""

from __future__ import annotations

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import (
    FULL,
    QKV,
    SLIDING,
    Layout,
    max_window_layers,
    qwen_kinds,
    read_decoder,
)
from jaxkv.models.families.experts import MAX_EXPERTS, Experts, qwen_dense, read_router
from jaxkv.models.spec import ModelSpec


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    count = config.size("num_experts", at_most=MAX_EXPERTS)
    experts = Experts(
        count=count,
        width=config.size("moe_intermediate_size"),
        shared="mlp.shared_expert.",
        shared_width=config.size("shared_expert_intermediate_size"),
        shared_gate="mlp.shared_expert_gate",
    )
    is_normalised = config.flag("norm_topk_prob", False)
    return read_decoder(
        config,
        biased=QKV * config.flag("qkv_bias", True),
        kinds=_kinds(config),
        experts=experts.leaves,
        is_dense=qwen_dense(config),
        router=read_router(config, count, used="num_experts_per_tok", is_normalised=is_normalised),
    )


def _kinds(config: ConfigReader) -> list[str]:
    """Reads each layer's kind; without a list every other one of the first `max_window_layers` has
    the window.
    """
    if config.get("layer_types") is not None or not config.flag("use_sliding_window", False):
        return qwen_kinds(config)
    first = max_window_layers(config)
    return [SLIDING if i % 2 == 0 and i < first else FULL for i in range(config.num_layers)]
