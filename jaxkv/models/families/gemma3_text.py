"""Gemma 3: five layers with a window and a rotary embedding of their own for each that sees all.
Source: arXiv 2503.19786.
"""

from __future__ import annotations

from dataclasses import replace

from jaxkv.models.config_reader import MAX_LAYERS, ConfigReader
from jaxkv.models.families.base import (
    FULL,
    QKV,
    SANDWICH,
    SLIDING,
    Layout,
    read_decoder,
    read_kinds,
)
from jaxkv.models.families.gemma2 import scales
from jaxkv.models.rope_config import read_layer_ropes, read_rope
from jaxkv.models.spec import ModelSpec, RopeSpec


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    config.refuse("use_bidirectional_attention", False)
    config.refuse("attn_logit_softcapping")  # transformers reads it and caps nothing
    num_layers = config.size("num_hidden_layers", at_most=MAX_LAYERS)
    pattern = config.size("sliding_window_pattern", 6)
    kinds = read_kinds(config, num_layers, every=pattern)
    return read_decoder(
        config,
        family="gemma3_text",
        names=replace(SANDWICH, q_norm="self_attn.q_norm", k_norm="self_attn.k_norm"),
        biased=(*QKV, "o") * config.flag("attention_bias", False),
        kinds=kinds,
        ropes=_ropes(config, kinds),
        **scales(config),
    )


def _ropes(config: ConfigReader, kinds: list[str]) -> tuple[RopeSpec, ...]:
    """Reads each layer's embedding; in older files that of layers with a window has a key of its
    own and is never scaled.
    """
    max_len, head_dim = config.size("max_position_embeddings"), config.size("head_dim")
    if {FULL, SLIDING} & config.section("rope_parameters").values.keys():
        return read_layer_ropes(config, kinds, max_len=max_len, head_dim=head_dim)
    wide = read_rope(config.with_defaults({"rope_theta": 1e6}), max_len=max_len, head_dim=head_dim)
    local = RopeSpec(theta=config.number("rope_local_base_freq", 1e4, at_least=1.001))
    return tuple(local if kind == SLIDING else wide for kind in kinds)
