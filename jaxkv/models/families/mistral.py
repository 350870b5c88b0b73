"""Mistral: Llama with one sliding window for every layer, or none. Source: arXiv 2310.06825.

A file that says of each layer what it is means Ministral, as published ones of Ministral 8B do.
"""

from __future__ import annotations

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families import ministral
from jaxkv.models.families.base import Layout, mistral_kinds, read_decoder
from jaxkv.models.spec import ModelSpec


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    if config.get("layer_types") is not None:
        return ministral.read(config)
    return read_decoder(config, kinds=mistral_kinds(config))
