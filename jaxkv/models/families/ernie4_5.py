"""ERNIE 4.5 (dense): Llama with interleaved rotation. Source: ERNIE 4.5 technical report (Baidu,
2025).
"""

from __future__ import annotations

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import MLP, QKV, Layout, read_decoder
from jaxkv.models.spec import ModelSpec


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    biased = (*QKV, "o", *MLP) * config.flag("use_bias", False)
    return read_decoder(config, biased=biased, interleaved=True)
