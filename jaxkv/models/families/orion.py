"""Orion 14B: Llama with LayerNorms. Source: arXiv 2401.12246; vLLM's OrionForCausalLM."""

from __future__ import annotations

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import Layout, read_decoder
from jaxkv.models.spec import ModelSpec


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    config.refuse("attention_bias", False)
    config.number("rms_norm_eps")  # without a default: transformers has none for it
    return read_decoder(config, biased=("attn_norm", "mlp_norm", "norm"), norm="layer")
