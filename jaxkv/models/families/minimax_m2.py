"""MiniMax-M2: norms of whole queries and keys, experts by sigmoid scores. Source: the model's card,
MiniMaxAI/MiniMax-M2.
"""

from __future__ import annotations

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import QK_NORMED, Layout, read_decoder
from jaxkv.models.families.experts import MAX_EXPERTS, Experts, read_router
from jaxkv.models.spec import AttentionSpec, ModelSpec


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    count = config.size("num_local_experts", at_most=MAX_EXPERTS)
    experts = Experts(
        count=count,
        width=config.size("intermediate_size"),
        router="block_sparse_moe.gate",
        one="block_sparse_moe.experts.{expert}.",
        gate="w1",
        up="w3",
        down="w2",
        bias="block_sparse_moe.e_score_correction_bias",
    )
    how = {"score": "sigmoid", "is_normalised": True}
    return read_decoder(
        config,
        family="minimax_m2",
        names=QK_NORMED,
        partly=True,
        attention=AttentionSpec(qk_norm="whole"),
        experts=experts.leaves,
        router=read_router(config, count, used="num_experts_per_tok", **how),
    )
