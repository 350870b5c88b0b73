"""GLM-4 of 2024: half of each head is rotated, interleaved; gate and up are fused. Source: arXiv
2406.12793.
"""

from __future__ import annotations

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import QKV, Layout, Names, read_decoder
from jaxkv.models.spec import ModelSpec


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    return read_decoder(
        config,
        names=Names(gate_up="mlp.gate_up_proj"),
        biased=QKV * config.flag("attention_bias", True),
        interleaved=True,
        partly=True,
    )
