"""Hunyuan (dense): Llama with norms on heads that are rotated already. Source: arXiv 2411.02265."""

from __future__ import annotations

from typing import Any

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import QKV, Layout, Names, read_decoder
from jaxkv.models.spec import AttentionSpec, ModelSpec


def read(
    config: ConfigReader, *, family: str = "hunyuan_v1_dense", **more: Any
) -> tuple[ModelSpec, Layout]:
    """Reads the model, or one that is alike but for what `more` says."""
    return read_decoder(
        config,
        family=family,
        names=Names(q_norm="self_attn.query_layernorm", k_norm="self_attn.key_layernorm"),
        biased=(*QKV, "o") * config.flag("attention_bias", False),
        attention=AttentionSpec(norm_after_rope=True),
        **more,
    )
