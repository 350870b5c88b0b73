"""Mistral: Llama with one sliding window for every layer, or none. Source: arXiv 2310.06825."""

from __future__ import annotations

from jaxkv.models.families.base import ConfigReader, Layout, read_llama_like
from jaxkv.models.spec import ModelSpec


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    # A config without the key means 4096 (transformers' default), null means full attention.
    windowed = config.values.get("sliding_window", 4096) is not None
    window = config.size("sliding_window", 4096) if windowed else None
    num_layers = config.size("num_hidden_layers", 32)
    return read_llama_like(
        config, family="mistral", windows=(window,) * num_layers, num_kv_heads=8, max_len=4096 * 32
    )
