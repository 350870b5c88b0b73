"""Persimmon: partly rotated heads with norms of queries and keys, weights fused by head. Source:
the model's card, adept/persimmon-8b-base.
"""

from __future__ import annotations

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import QKV, Layout, Names, read_decoder
from jaxkv.models.spec import ModelSpec


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    has_norms = config.flag("qk_layernorm", True)
    return read_decoder(
        config.replaced(num_key_value_heads=None, head_dim=None),
        names=Names(
            norm="model.final_layernorm",
            qkv="self_attn.query_key_value",
            o="self_attn.dense",
            q_norm="self_attn.q_layernorm" if has_norms else None,
            k_norm="self_attn.k_layernorm" if has_norms else None,
            gate=None,
            up="mlp.dense_h_to_4h",
            down="mlp.dense_4h_to_h",
        ),
        biased=(*QKV, "o", "up", "down", "attn_norm", "mlp_norm", "norm", "q_norm", "k_norm"),
        partly=True,
        fused_by_head=True,
        eps="layer_norm_eps",
        norm="layer",
    )
