"""The text part of Molmo 2: Qwen3, or Olmo with norms over all heads, whose matrices are fused.
Source: the model's card, allenai/Molmo2-8B.
"""

from __future__ import annotations

import re
from dataclasses import replace

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import QKV, Layout, Names, read_decoder
from jaxkv.models.rope_config import read_rope
from jaxkv.models.spec import AttentionSpec, ModelSpec, RopeSpec

NAMES = Names(
    norm="model.transformer.ln_f",
    layer="model.transformer.blocks.{layer}.",
    attn_norm="attn_norm",
    mlp_norm="ff_norm",
    qkv="self_attn.att_proj",
    o="self_attn.attn_out",
    q_norm="self_attn.q_norm",
    k_norm="self_attn.k_norm",
    gate_up="mlp.ff_proj",
    down="mlp.ff_out",
)
EMBED = "model.transformer.wte.embedding"
OF_PICTURES = "model.transformer.wte.new_embedding"
"""Has embeddings behind the vocabulary's, which nothing predicts: of pictures."""


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    names = NAMES
    if config.flag("norm_after", False):
        names = replace(
            names,
            attn_norm=None,
            post_attn_norm=names.attn_norm,
            mlp_norm=None,
            post_mlp_norm=names.mlp_norm,
        )
    kind = config.choice("qk_norm_type", "qwen3", ("qwen3", "olmo"))
    spec, layout = read_decoder(
        config,
        names=names,
        biased=QKV * config.flag("attention_bias", False),
        ropes=_ropes(config),
        attention=AttentionSpec(qk_norm="head" if kind == "qwen3" else "whole"),
    )
    (leaves,) = layout.layers
    gate, up = leaves["gate"], leaves["up"]
    # The tensor of both has what gates weigh in front of them.
    leaves = {**leaves, "gate": replace(gate, part=up.part), "up": replace(up, part=gate.part)}
    layout = layout.with_top(embed=replace(layout.top["embed"], source=EMBED))
    layout = replace(layout, layers=(leaves,), joined=((EMBED, OF_PICTURES),))
    return spec, layout.with_unread(re.escape(OF_PICTURES))


def _ropes(config: ConfigReader) -> list[RopeSpec]:
    """Reads the embedding of each layer: that of the config in `rope_scaling_layers`, in all others
    one of the same theta that is not scaled.
    """
    num_layers = config.num_layers
    scaled = read_rope(config)
    plain = RopeSpec(theta=scaled.theta)
    listed = config.whole_numbers("rope_scaling_layers", list(range(num_layers)))
    return [scaled if layer in listed else plain for layer in range(num_layers)]
