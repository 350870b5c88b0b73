"""OLMo 3: OLMo 2 with a window in three of four layers, whose rotary embedding is never scaled.
Source: arXiv 2512.13961.
"""

from __future__ import annotations

from jaxkv.models.config_reader import MAX_LAYERS, ConfigReader
from jaxkv.models.families.base import (
    FULL,
    POST_NORMED,
    QKV,
    SLIDING,
    Layout,
    read_decoder,
    read_kinds,
)
from jaxkv.models.rope_config import read_layer_ropes, read_rope
from jaxkv.models.spec import AttentionSpec, ModelSpec, RopeSpec


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    num_layers = config.size("num_hidden_layers", at_most=MAX_LAYERS)
    kinds = read_kinds(config, num_layers, every=4)
    return read_decoder(
        config,
        family="olmo3",
        names=POST_NORMED,
        biased=(*QKV, "o") * config.flag("attention_bias", False),
        kinds=kinds,
        ropes=_ropes(config, kinds),
        attention=AttentionSpec(qk_norm="whole"),
    )


def _ropes(config: ConfigReader, kinds: list[str]) -> tuple[RopeSpec, ...]:
    head_dim = config.size("hidden_size") // config.size("num_attention_heads")
    max_len, head_dim = config.size("max_position_embeddings"), head_dim
    if {FULL, SLIDING} & config.section("rope_parameters").values.keys():
        return read_layer_ropes(config, kinds, max_len=max_len, head_dim=head_dim)
    wide = read_rope(config, max_len=max_len, head_dim=head_dim)
    local = RopeSpec(theta=wide.theta)
    return tuple(local if kind == SLIDING else wide for kind in kinds)
