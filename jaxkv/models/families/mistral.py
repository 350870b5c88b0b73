"""Mistral: Llama with one sliding window for every layer, or none. Source: arXiv 2310.06825."""

from __future__ import annotations

from jaxkv.models.config_reader import MAX_LAYERS, ConfigReader
from jaxkv.models.families.base import FULL, SLIDING, Layout, read_decoder
from jaxkv.models.spec import ModelSpec


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    kind = FULL if config.get("sliding_window") is None else SLIDING
    kinds = [kind] * config.size("num_hidden_layers", at_most=MAX_LAYERS)
    return read_decoder(config, family="mistral", kinds=kinds)
