"""Helium 1: Llama with interleaved rotation. Source: the model's card,
kyutai/helium-1-preview-2b.
"""

from __future__ import annotations

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import QKV, Layout, mlp_biased, read_decoder
from jaxkv.models.spec import ModelSpec


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    biased = QKV * config.flag("attention_bias", False) + mlp_biased(config)
    return read_decoder(config, biased=biased, interleaved=True)
