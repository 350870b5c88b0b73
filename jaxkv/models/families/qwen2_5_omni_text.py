"""The text part of Qwen2.5-Omni: Qwen2, as its rotary embedding is for text alone. Source: arXiv
2503.20215.
"""

from __future__ import annotations

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import QKV, Layout, qwen_kinds, read_decoder
from jaxkv.models.spec import ModelSpec


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    return read_decoder(config, family="qwen2_5_omni_text", biased=QKV, kinds=qwen_kinds(config))
