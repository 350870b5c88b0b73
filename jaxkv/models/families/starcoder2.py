"""StarCoder 2: LayerNorms, an MLP without a gate, biases. Source: arXiv 2402.19173."""

from __future__ import annotations

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import QKV, Layout, Names, mistral_kinds, read_decoder
from jaxkv.models.spec import ModelSpec


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    biased: tuple[str, ...] = ("attn_norm", "mlp_norm", "norm")
    biased += (*QKV, "o", "up", "down") * config.flag("use_bias", True)
    return read_decoder(
        config,
        names=Names(gate=None, up="mlp.c_fc", down="mlp.c_proj"),
        biased=biased,
        kinds=mistral_kinds(config),
        eps="norm_epsilon",
        norm="layer",
    )
