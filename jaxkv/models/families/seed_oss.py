"""Seed-OSS: Llama with biases on queries, keys and values. Source: the model's card,
ByteDance-Seed/Seed-OSS-36B-Instruct.
"""

from __future__ import annotations

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import QKV, Layout, mlp_biased, read_decoder
from jaxkv.models.spec import ModelSpec


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    biased = QKV * config.flag("attention_bias", True)
    biased += ("o",) * config.flag("attention_out_bias", False)
    biased += mlp_biased(config)
    return read_decoder(config, biased=biased)
