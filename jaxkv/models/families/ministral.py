"""Ministral: Mistral with a window in some layers. Source: the model's card,
mistralai/Ministral-8B-Instruct-2410.
"""

from __future__ import annotations

from jaxkv.models.config_reader import MAX_LAYERS, ConfigReader
from jaxkv.models.families.base import Layout, read_decoder, read_kinds
from jaxkv.models.spec import ModelSpec


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    num_layers = config.size("num_hidden_layers", at_most=MAX_LAYERS)
    kinds = None
    if config.get("sliding_window") is not None:
        kinds = read_kinds(config, num_layers)
    return read_decoder(config, family="ministral", kinds=kinds)
