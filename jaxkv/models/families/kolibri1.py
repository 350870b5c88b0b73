"""Kolibri 1: the windows of EXAONE 4 and the norms of GLM-4, and experts chosen by logits and a
bias, beside one for all tokens. Source: the model's card, Aleph-Alpha/Kolibri-1.
"""

from __future__ import annotations

from dataclasses import replace

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import QK_NORMED, Layout, read_decoder
from jaxkv.models.families.exaone4 import read_kinds_and_ropes
from jaxkv.models.families.experts import read_router
from jaxkv.models.families.qwen3_moe import read_experts
from jaxkv.models.spec import ModelSpec

SPELLINGS = (
    (r"\.moe\.router\.expert_bias$", ".mlp.gate.e_score_correction_bias"),
    (r"\.post_attn_norm\.", ".post_self_attn_layernorm."),
    (r"\.post_ffn_norm\.", ".post_mlp_layernorm."),
)


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    kinds, ropes = read_kinds_and_ropes(config.with_defaults({"sliding_window_pattern": 5}))
    experts = replace(
        read_experts(config),
        bias="mlp.gate.e_score_correction_bias",
        shared="mlp.shared_experts.",
        shared_width=config.size("shared_expert_intermediate_size"),
    )
    spec, layout = read_decoder(
        # No layer is dense, and configs say nothing of how wide one would be.
        config.replaced(intermediate_size=config.size("moe_intermediate_size")),
        names=replace(
            QK_NORMED,
            post_attn_norm="post_self_attn_layernorm",
            post_mlp_norm="post_mlp_layernorm",
        ),
        kinds=kinds,
        ropes=ropes,
        experts=experts.leaves,
        router=read_router(
            config,
            experts.count,
            used="num_experts_per_tok",
            score="sigmoid",
            by_logits=True,
            is_normalised=config.flag("norm_topk_prob", True),
        ),
    )
    return spec, replace(layout, spellings=SPELLINGS)
