"""Llama 2 and 3.x, and what shares their config (SmolLM2). Source: arXiv 2302.13971, 2407.21783."""

from __future__ import annotations

from jaxkv.models.families.base import ConfigReader, Layout, read_llama_like
from jaxkv.models.spec import ModelSpec


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    bias = config.flag("attention_bias", False)
    return read_llama_like(
        config, family="llama", qkv_bias=bias, o_bias=bias, mlp_bias=config.flag("mlp_bias", False)
    )
