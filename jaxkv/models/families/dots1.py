"""dots.llm1: Qwen3's attention with the experts of DeepSeek V3. Source: arXiv 2506.05767."""

from __future__ import annotations

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import QK_NORMED, Layout, attn_biased, qwen_kinds, read_decoder
from jaxkv.models.families.experts import first_dense, read_grouped
from jaxkv.models.spec import ModelSpec


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    experts, router = read_grouped(config)
    config = config.replaced(use_sliding_window=True)  # a key that it does not have
    return read_decoder(
        config,
        names=QK_NORMED,
        biased=attn_biased(config),
        kinds=qwen_kinds(config),
        experts=experts.leaves,
        is_dense=first_dense(config),
        router=router,
    )
