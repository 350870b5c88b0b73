"""Qwen3 (dense): RMS norm on every query and key head, head_dim apart from D / N. Source: arXiv
2505.09388.
"""

from __future__ import annotations

from jaxkv.models.families.base import ConfigReader, Layout, layer_windows, read_llama_like
from jaxkv.models.spec import ModelSpec


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    bias = config.flag("attention_bias", False)
    return read_llama_like(
        config,
        family="qwen3",
        windows=layer_windows,
        num_kv_heads=32,
        head_dim=128,
        max_len=32768,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
    )
