"""MiniMax-M2: norms of whole queries and keys, experts by sigmoid scores. Source: the model's card,
MiniMaxAI/MiniMax-M2.
"""

from __future__ import annotations

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import QK_NORMED, Layout, read_decoder
from jaxkv.models.families.experts import read_mixtral, read_router
from jaxkv.models.spec import AttentionSpec, ModelSpec


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    experts = read_mixtral(config, bias="block_sparse_moe.e_score_correction_bias")
    if config.get("rotary_dim") is not None:  # as published files say how much of a head is rotated
        head_dim = config.size("head_dim")
        part = config.size("rotary_dim", at_most=head_dim) / head_dim
        config = config.replaced(partial_rotary_factor=part)
    how = {"score": "sigmoid", "is_normalised": True}
    return read_decoder(
        config,
        names=QK_NORMED,
        partly=True,
        attention=AttentionSpec(qk_norm="whole"),
        experts=experts.leaves,
        router=read_router(config, experts.count, used="num_experts_per_tok", **how),
    )
