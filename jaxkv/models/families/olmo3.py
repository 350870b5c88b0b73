"""OLMo 3: OLMo 2 with a window in three of four layers, whose rotary embedding is never scaled.
Source: arXiv 2512.13961.
"""

from __future__ import annotations

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import POST_NORMED, Layout, attn_biased, read_decoder, read_kinds
from jaxkv.models.families.gemma3_text import read_window_ropes
from jaxkv.models.spec import AttentionSpec, ModelSpec

THETA = 500000.0
"""The base of layers with a window in files that say nothing of them, whatever the others have."""


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    kinds = read_kinds(config, every=4)
    return read_decoder(
        config,
        names=POST_NORMED,
        biased=attn_biased(config),
        kinds=kinds,
        ropes=read_window_ropes(config, kinds, theta=THETA, local=THETA),
        attention=AttentionSpec(qk_norm="whole"),
    )
