"""EXAONE 3: Llama by other names. Source: arXiv 2408.03541."""

from __future__ import annotations

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import Layout, Names, attn_biased, mlp_biased, read_decoder
from jaxkv.models.spec import ModelSpec

NAMES = Names(
    embed="transformer.wte",
    norm="transformer.ln_f",
    layer="transformer.h.{layer}.",
    attn_norm="ln_1",
    mlp_norm="ln_2",
    q="attn.attention.q_proj",
    k="attn.attention.k_proj",
    v="attn.attention.v_proj",
    o="attn.attention.out_proj",
    gate="mlp.c_fc_0",
    up="mlp.c_fc_1",
    down="mlp.c_proj",
)
OWN = {
    "num_layers": "num_hidden_layers",
    "layer_norm_epsilon": "rms_norm_eps",
    "activation_function": "hidden_act",
}
"""Maps keys as the published config has them to those of Llama."""


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    named = {theirs: config.get(own) for own, theirs in OWN.items() if config.get(own) is not None}
    biased = attn_biased(config) + mlp_biased(config)
    return read_decoder(config.replaced(**named), names=NAMES, biased=biased)
