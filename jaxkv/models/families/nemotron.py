"""Nemotron-4 and Minitron: LayerNorms whose weights are stored less one, an MLP without a gate.
Source: arXiv 2402.16819, 2407.14679.
"""

from __future__ import annotations

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import Layout, Names, attn_biased, mlp_biased, read_decoder
from jaxkv.models.spec import ModelSpec


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    biased: tuple[str, ...] = ("attn_norm", "mlp_norm", "norm")
    biased += attn_biased(config)
    biased += mlp_biased(config)
    return read_decoder(
        config,
        partly=True,
        names=Names(gate=None),
        biased=biased,
        eps="norm_eps",
        norm="layer_one",
    )
