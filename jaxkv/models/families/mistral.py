"""Mistral: Llama with one sliding window for every layer, or none. Source: arXiv 2310.06825."""

from __future__ import annotations

from jaxkv.models.families.base import ConfigReader, Layout, read_llama_like, sliding_window
from jaxkv.models.spec import ModelSpec


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    return read_llama_like(
        config, family="mistral", windows=_windows, num_kv_heads=8, max_len=4096 * 32
    )


def _windows(config: ConfigReader, num_layers: int) -> tuple[int | None, ...]:
    return (sliding_window(config),) * num_layers
