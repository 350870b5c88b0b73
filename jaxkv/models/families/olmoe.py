"""OLMoE: OLMo 2's norms of whole queries and keys, with experts. Source: arXiv 2409.02060."""

from __future__ import annotations

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import QK_NORMED, Layout, attn_biased, read_decoder
from jaxkv.models.families.experts import MAX_EXPERTS, Experts, read_router
from jaxkv.models.spec import AttentionSpec, ModelSpec


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    count = config.size("num_experts", at_most=MAX_EXPERTS)
    is_normalised = config.flag("norm_topk_prob", False)
    return read_decoder(
        config,
        names=QK_NORMED,
        biased=attn_biased(config),
        attention=AttentionSpec(qk_norm="whole", clip=config.cap("clip_qkv")),
        experts=Experts(count=count, width=config.size("intermediate_size")).leaves,
        router=read_router(config, count, used="num_experts_per_tok", is_normalised=is_normalised),
    )
