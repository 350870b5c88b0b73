"""Phi-1, 1.5 and 2: attention and MLP side by side behind one LayerNorm, partly rotated heads.
Source: arXiv 2306.11644, 2309.05463.
"""

from __future__ import annotations

from dataclasses import replace

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import QKV, Layout, Names, read_decoder
from jaxkv.models.spec import ModelSpec

NAMES = Names(
    norm="model.final_layernorm",
    mlp_norm=None,
    o="self_attn.dense",
    gate=None,
    up="mlp.fc1",
    down="mlp.fc2",
)
QK_NORM = {"q_norm": "self_attn.q_layernorm", "k_norm": "self_attn.k_layernorm"}


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    has_norm = config.flag("qk_layernorm", False)
    return read_decoder(
        config,
        partly=True,
        names=replace(NAMES, **QK_NORM) if has_norm else NAMES,
        biased=(*QKV, "o", "up", "down", "attn_norm", "norm", "head", "q_norm", "k_norm"),
        eps="layer_norm_eps",
        norm="layer",
        is_parallel=True,
    )
