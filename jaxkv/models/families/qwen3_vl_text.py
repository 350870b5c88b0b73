"""The text part of Qwen3-VL: Qwen3, as its rotary embedding is for text alone. Source: arXiv
2511.21631.
"""

from __future__ import annotations

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import QK_NORMED, QKV, Layout, read_decoder
from jaxkv.models.spec import ModelSpec


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    biased = (*QKV, "o") * config.flag("attention_bias", False)
    return read_decoder(config, family="qwen3_vl_text", names=QK_NORMED, biased=biased)
