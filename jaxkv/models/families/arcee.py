"""AFM: Llama with an MLP without a gate. Source: the model's card, arcee-ai/AFM-4.5B."""

from __future__ import annotations

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import Layout, Names, attn_biased, mlp_biased, read_decoder
from jaxkv.models.spec import ModelSpec


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    biased = attn_biased(config) + mlp_biased(config)
    return read_decoder(config, names=Names(gate=None), biased=biased)
