"""Granite 3 MoE: Granite with experts. Source: arXiv 2408.13359 (the factors)."""

from __future__ import annotations

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import Layout, attn_biased, read_decoder
from jaxkv.models.families.experts import MAX_EXPERTS, Experts, read_router
from jaxkv.models.families.granite import scales
from jaxkv.models.spec import AttentionSpec, ModelSpec


def read(config: ConfigReader, *, experts: Experts | None = None) -> tuple[ModelSpec, Layout]:
    experts = experts or read_experts(config)
    return read_decoder(
        config,
        biased=attn_biased(config),
        attention=AttentionSpec(scale=config.number("attention_multiplier", 1.0)),
        scales=scales(config),
        experts=experts.leaves,
        router=read_router(config, experts.count, used="num_experts_per_tok", of_chosen=True),
    )


def read_experts(config: ConfigReader) -> Experts:
    """Reads experts whose weights are in two tensors."""
    return Experts(
        count=config.size("num_local_experts", at_most=MAX_EXPERTS),
        width=config.size("intermediate_size"),
        router="block_sparse_moe.router.layer",
        fused=("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"),
    )
