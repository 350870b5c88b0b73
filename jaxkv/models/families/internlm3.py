"""InternLM3: Llama, with biases everywhere or nowhere. Source: the model's card,
internlm/internlm3-8b-instruct.
"""

from __future__ import annotations

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import MLP, QKV, Layout, read_decoder
from jaxkv.models.spec import ModelSpec


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    spellings = ("attention_bias", "mlp_bias", "qkv_bias", "bias")
    has_bias = True in [config.flag(name, False) for name in spellings]
    return read_decoder(config, biased=(*QKV, "o", *MLP) * has_bias)
