"""Mistral: Llama with one sliding window for every layer, or none. Source: arXiv 2310.06825."""

from __future__ import annotations

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import FULL, SLIDING, Layout, read_decoder
from jaxkv.models.spec import ModelSpec


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    kind = FULL if config.get("sliding_window") is None else SLIDING
    kinds = [kind] * config.num_layers
    return read_decoder(config, kinds=kinds)
