"""AFM: Llama with an MLP without a gate. Source: the model's card, arcee-ai/AFM-4.5B."""

from __future__ import annotations

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import QKV, Layout, Names, read_decoder
from jaxkv.models.spec import ModelSpec


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    biased = (*QKV, "o") * config.flag("attention_bias", False)
    biased += ("up", "down") * config.flag("mlp_bias", False)
    return read_decoder(config, names=Names(gate=None), biased=biased)
