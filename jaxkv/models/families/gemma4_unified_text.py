"""The text part of Gemma 4 Unified: Gemma 4 without inputs of each layer's own and without experts.
Source: transformers' Gemma4Unified.
"""

from __future__ import annotations

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families import gemma4_text
from jaxkv.models.families.base import Layout
from jaxkv.models.spec import ModelSpec


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    config.refuse("hidden_size_per_layer_input", 0)
    config.refuse("enable_moe_block", False)
    return gemma4_text.read(config)
