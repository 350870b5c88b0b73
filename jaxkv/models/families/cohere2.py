"""Command R7B and Command A: Command R with a window in three of four layers; the fourth rotates
nothing. Source: arXiv 2504.00698.
"""

from __future__ import annotations

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import SLIDING, Layout, Names, attn_biased, read_decoder, read_kinds
from jaxkv.models.rope_config import read_rope
from jaxkv.models.spec import ModelSpec, Scales


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    kinds = read_kinds(config, every=config.size("sliding_window_pattern", 4))
    rope = read_rope(config, interleaved=True)
    return read_decoder(
        config,
        names=Names(mlp_norm=None),
        biased=attn_biased(config),
        kinds=kinds,
        ropes=[rope if kind == SLIDING else None for kind in kinds],
        eps="layer_norm_eps",
        norm="layer",
        is_parallel=True,
        scales=Scales(logits=config.number("logit_scale", 0.0625)),
    )
