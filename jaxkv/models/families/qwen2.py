"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values. Source: arXiv 2407.10671."""

from __future__ import annotations

from jaxkv.models.families.base import ConfigReader, Layout, layer_windows, read_llama_like
from jaxkv.models.spec import ModelSpec


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    return read_llama_like(
        config, family="qwen2", windows=layer_windows, num_kv_heads=32, max_len=32768, qkv_bias=True
    )
