"""VaultGemma: Gemma 2 without norms behind attention and MLP. Source: arXiv 2510.15001."""

from __future__ import annotations

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import Layout, Names, attn_biased, read_decoder, read_kinds
from jaxkv.models.families.gemma2 import scales
from jaxkv.models.spec import ModelSpec


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    config.refuse("use_bidirectional_attention", False)
    return read_decoder(
        config,
        names=Names(mlp_norm="pre_feedforward_layernorm"),
        biased=attn_biased(config),
        kinds=read_kinds(config, every=2),
        **scales(config),
    )
