"""The text part of Qwen3-VL, and of Cosmos 3: Qwen3, as its rotary embedding is for text alone.
Sources: arXiv 2511.21631, nvidia/Cosmos3-Nano.
"""

from __future__ import annotations

from dataclasses import replace

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import QK_NORMED, Layout, attn_biased, read_decoder
from jaxkv.models.spec import ModelSpec

COSMOS = (
    (r"\.self_attn\.to_([qkv])\.", r".self_attn.\1_proj."),
    (r"\.self_attn\.to_out\.", ".self_attn.o_proj."),
    (r"\.self_attn\.norm_([qk])\.", r".self_attn.\1_norm."),
)
"""How Cosmos 3 calls tensors."""

OF_PICTURES = (
    r"model\.layers\..*(add_[qkv]_proj|to_add_out|norm_added_[qk]|moe_gen|k_norm_und_for_gen).*"
)
"""Matches tensors of Cosmos 3's layers by which it makes pictures."""


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    biased = attn_biased(config)
    spec, layout = read_decoder(config, names=QK_NORMED, biased=biased)
    return spec, replace(layout, spellings=COSMOS).with_unread(OF_PICTURES)
