"""Mistral: Llama with one sliding window for every layer, or none. Source: arXiv 2310.06825."""

from __future__ import annotations

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import Layout, mistral_kinds, read_decoder
from jaxkv.models.spec import ModelSpec


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    return read_decoder(config, kinds=mistral_kinds(config))
