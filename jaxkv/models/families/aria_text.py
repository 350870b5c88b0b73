"""The text part of Aria: Llama with experts, all of a layer in one tensor, beside shared ones.
Source: arXiv 2410.05993.
"""

from __future__ import annotations

from dataclasses import replace

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import Layout, attn_biased, read_decoder
from jaxkv.models.families.experts import MAX_EXPERTS, Experts, read_router
from jaxkv.models.spec import ModelSpec

SPELLINGS = (
    (r"\.experts\.gate_up_proj$", ".experts.fc1.weight"),
    (r"\.experts\.down_proj$", ".experts.fc2.weight"),
)


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    config.refuse("mlp_bias", False)
    count = config.size("moe_num_experts", at_most=MAX_EXPERTS)
    width = config.size("intermediate_size")
    experts = Experts(
        count=count,
        width=width,
        router="mlp.router",
        shared="mlp.shared_experts.",
        shared_width=width * config.size("moe_num_shared_experts"),
        fused=("mlp.experts.fc1.weight", "mlp.experts.fc2.weight"),
        transposed=True,
    )
    spec, layout = read_decoder(
        config,
        biased=attn_biased(config),
        activations=("silu",),  # that of experts, whatever the shared ones have
        experts=experts.leaves,
        router=read_router(config, count, used="moe_topk", of_chosen=True),
    )
    return spec, replace(layout, spellings=SPELLINGS)
