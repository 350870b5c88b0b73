"""DeepSeekMoE 16B: Llama with experts that are chosen by softmax, beside shared ones. Source: arXiv
2401.06066.
"""

from __future__ import annotations

from dataclasses import replace

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import Layout, attn_biased, read_decoder
from jaxkv.models.families.experts import first_dense, read_grouped
from jaxkv.models.spec import ModelSpec


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    config.refuse("scoring_func", "softmax")
    # Its authors' DeepseekConfig, which transformers does not have, normalises no weights by
    # default.
    config = config.with_defaults({"norm_topk_prob": False})
    if config.get("n_routed_experts") is None:
        return read_decoder(config, biased=attn_biased(config))
    experts, router = read_grouped(config.replaced(n_group=1, topk_group=1))
    every, first = config.size("moe_layer_freq", 1), first_dense(config)
    return read_decoder(
        config,
        biased=attn_biased(config),
        experts=replace(experts, bias=None).leaves,
        is_dense=[i for i in range(config.num_layers) if i in first or i % every],
        router=replace(router, score="softmax", by_two=False),
    )
