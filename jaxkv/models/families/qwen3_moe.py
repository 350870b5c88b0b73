"""Qwen3 MoE: Qwen3 with experts. Source: arXiv 2505.09388."""

from __future__ import annotations

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import FULL, QK_NORMED, SLIDING, Layout, attn_biased, read_decoder
from jaxkv.models.families.experts import MAX_EXPERTS, Experts, qwen_dense, read_router
from jaxkv.models.spec import ModelSpec


def read(config: ConfigReader, *, experts: Experts | None = None) -> tuple[ModelSpec, Layout]:
    experts = experts or read_experts(config)
    count = experts.count
    is_normalised = config.flag("norm_topk_prob", False)
    # For all layers or none: `max_window_layers` says nothing here.
    has_window = (
        config.flag("use_sliding_window", False) and config.get("sliding_window") is not None
    )
    return read_decoder(
        config,
        names=QK_NORMED,
        biased=attn_biased(config),
        kinds=[SLIDING if has_window else FULL] * config.num_layers,
        experts=experts.leaves,
        is_dense=qwen_dense(config),
        router=read_router(config, count, used="num_experts_per_tok", is_normalised=is_normalised),
    )


def read_experts(config: ConfigReader) -> Experts:
    """Reads experts with tensors of their own."""
    # transformers 5 writes the second name.
    name = "num_experts" if config.get("num_experts") is not None else "num_local_experts"
    count = config.size(name, at_most=MAX_EXPERTS)
    return Experts(count=count, width=config.size("moe_intermediate_size"))
