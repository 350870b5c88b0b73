"""Ministral: Mistral with a window in some layers. Source: the model's card,
mistralai/Ministral-8B-Instruct-2410.
"""

from __future__ import annotations

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import Layout, read_decoder, read_kinds
from jaxkv.models.spec import ModelSpec


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    kinds = None
    if config.get("sliding_window") is not None:
        kinds = read_kinds(config)
    return read_decoder(config, kinds=kinds)
