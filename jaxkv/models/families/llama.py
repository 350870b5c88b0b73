"""Llama 2 and 3.x, and what shares their config (SmolLM2). Source: arXiv 2302.13971, 2407.21783."""

from __future__ import annotations

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import Layout, attn_biased, mlp_biased, read_decoder
from jaxkv.models.spec import ModelSpec


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    biased = attn_biased(config) + mlp_biased(config)
    return read_decoder(config, biased=biased)
