"""The text part of Cosmos 3 Edge: Llama with an MLP without gates, as its rotary embedding is for
text alone. Source: nvidia/Cosmos3-Edge.
"""

from __future__ import annotations

from dataclasses import replace

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import Layout, Names, attn_biased, mlp_biased, read_decoder
from jaxkv.models.families.qwen3_vl_text import COSMOS, OF_PICTURES
from jaxkv.models.spec import ModelSpec

MLP = ((r"\.mlp\.up_proj\.", ".mlp.fc1."), (r"\.mlp\.down_proj\.", ".mlp.fc2."))
"""How checkpoints call its matrices, and what transformers does."""


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    biased = attn_biased(config) + mlp_biased(config)
    spec, layout = read_decoder(
        config,
        names=Names(gate=None, up="mlp.fc1", down="mlp.fc2"),
        biased=biased,
    )
    return spec, replace(layout, spellings=(*COSMOS, *MLP)).with_unread(OF_PICTURES)
