"""Qwen3 MoE: Qwen3 with experts. Source: arXiv 2505.09388."""

from __future__ import annotations

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import QK_NORMED, QKV, Layout, qwen_kinds, read_decoder
from jaxkv.models.families.experts import MAX_EXPERTS, Experts, qwen_dense, read_router
from jaxkv.models.spec import ModelSpec


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    # transformers 5 writes the second name.
    name = "num_experts" if config.get("num_experts") is not None else "num_local_experts"
    count = config.size(name, at_most=MAX_EXPERTS)
    is_normalised = config.flag("norm_topk_prob", False)
    return read_decoder(
        config,
        family="qwen3_moe",
        names=QK_NORMED,
        biased=(*QKV, "o") * config.flag("attention_bias", False),
        kinds=qwen_kinds(config),
        experts=Experts(count=count, width=config.size("moe_intermediate_size")).leaves,
        is_dense=qwen_dense(config),
        router=read_router(config, count, used="num_experts_per_tok", is_normalised=is_normalised),
    )
