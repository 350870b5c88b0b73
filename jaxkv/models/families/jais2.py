"""Jais 2: LayerNorms, biases, an MLP without a gate. Source: the model's card,
inceptionai/Jais-2-8B-Chat.
"""

from __future__ import annotations

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import Layout, Names, attn_biased, mlp_biased, read_decoder
from jaxkv.models.spec import ModelSpec


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    biased: tuple[str, ...] = ("attn_norm", "mlp_norm", "norm")
    biased += attn_biased(config, default=True)
    biased += mlp_biased(config, default=True)
    return read_decoder(
        config,
        names=Names(gate=None),
        biased=biased,
        eps="layer_norm_eps",
        norm="layer",
    )
