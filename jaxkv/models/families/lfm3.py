"""LFM3: LFM2 with norms on both sides, gated attention, and windows in some layers, which have a
rotary embedding of their own. Source: the model's card, LiquidAI/LFM3-1.7B.
"""

from __future__ import annotations

from dataclasses import replace

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import FULL, LAYER, SLIDING, Layout, attn_biased, leaf
from jaxkv.models.families.lfm2 import CONV, NAMES, read_convolutions
from jaxkv.models.rope_config import read_layer_ropes
from jaxkv.models.spec import ModelSpec

ROPES = {
    SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
    FULL: {"rope_type": "proportional", "rope_theta": 1000000.0, "partial_rotary_factor": 0.5},
}


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    num_layers = config.num_layers
    otherwise = [
        FULL if i % 4 == 2 else SLIDING if i and i % 4 == 0 else CONV for i in range(num_layers)
    ]
    kinds = config.kinds("layer_types", num_layers, (FULL, SLIDING, CONV), otherwise)
    attending = [FULL if kind == CONV else kind for kind in kinds]
    if config.get("rope_parameters") is None:
        config = config.replaced(rope_parameters=ROPES)
    # Of a section that has none, of whichever kind of layers.
    config = config.with_defaults({"rope_theta": ROPES[FULL]["rope_theta"]})
    names = replace(
        NAMES, o="self_attn.o_proj", q_norm="self_attn.q_norm", k_norm="self_attn.k_norm"
    )
    if config.flag("use_sandwich_norm", True):
        names = replace(names, post_attn_norm="post_operator_norm", post_mlp_norm="post_ffn_norm")
    spec, layout = read_convolutions(
        config,
        [layer for layer, kind in enumerate(kinds) if kind == CONV],
        names=names,
        biased=attn_biased(config),
        kinds=attending,
        ropes=read_layer_ropes(config, attending),
    )
    if not config.flag("use_attention_gate", True):
        return spec, layout
    source = f"{LAYER}self_attn.gate_proj.weight"
    gate = {"attn_gate": leaf(source, (spec.num_heads, spec.hidden_size), ("heads", "model"))}
    layers = tuple({**one, **gate} if "q" in one else one for one in layout.layers)
    spellings = ((r"\.self_attn\.g_proj\.", ".self_attn.gate_proj."),)
    return spec, replace(layout, layers=layers, spellings=spellings)
