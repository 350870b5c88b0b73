"""Qwen3 (dense): RMS norm on every query and key head, head_dim apart from D / N. Source: arXiv
2505.09388.
"""

from __future__ import annotations

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import QK_NORMED, Layout, attn_biased, qwen_kinds, read_decoder
from jaxkv.models.spec import ModelSpec


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    biased = attn_biased(config)
    return read_decoder(config, names=QK_NORMED, biased=biased, kinds=qwen_kinds(config))
