"""The text part of Qwen3-Omni: Qwen3 MoE, as its rotary embedding is for text alone. Source: arXiv
2509.17765.
"""

from __future__ import annotations

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families import qwen3_moe
from jaxkv.models.families.base import Layout
from jaxkv.models.spec import ModelSpec


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    config.refuse("use_sliding_window", False)
    return qwen3_moe.read(config)
