"""Bamba: Mamba2, and attention in a few layers. Source: transformers' Bamba."""

from __future__ import annotations

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import Layout, Names, attn_biased, mlp_biased, read_decoder
from jaxkv.models.families.hybrid import with_mixer
from jaxkv.models.families.ssm import read_bamba_mixer
from jaxkv.models.spec import ModelSpec

NAMES = Names(
    norm="model.final_layernorm",
    mlp_norm="pre_ff_layernorm",
    gate="feed_forward.gate_proj",
    up="feed_forward.up_proj",
    down="feed_forward.down_proj",
)


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    num_layers = config.num_layers
    full = config.whole_numbers("attn_layer_indices", [], at_least=0, at_most=num_layers - 1)
    mixer, leaves = read_bamba_mixer(config, f"{NAMES.layer}mamba.", norm_eps=1e-5)
    biased = attn_biased(config) + mlp_biased(config)
    # transformers rotates half of each head whatever the config says.
    half = config.replaced(partial_rotary_factor=0.5)
    return with_mixer(
        read_decoder(half, names=NAMES, biased=biased, partly=True),
        [layer for layer in range(num_layers) if layer not in full],
        mixer,
        leaves,
    )
