"""Llama 2 and 3.x, and what shares their config (SmolLM2). Source: arXiv 2302.13971, 2407.21783."""

from __future__ import annotations

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import MLP, QKV, Layout, read_decoder
from jaxkv.models.spec import ModelSpec


def read(config: ConfigReader, *, family: str = "llama") -> tuple[ModelSpec, Layout]:
    """Reads the model, or one that is alike but for its name."""
    biased = (*QKV, "o") * config.flag("attention_bias", False)
    biased += MLP * config.flag("mlp_bias", False)
    return read_decoder(config, family=family, biased=biased)
