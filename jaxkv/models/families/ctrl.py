"""CTRL: positions that are computed join scaled embeddings. Source: arXiv 1909.05858."""

from __future__ import annotations

from jaxkv.models.config_reader import MAX_LAYERS, ConfigReader
from jaxkv.models.families import gpt2
from jaxkv.models.families.base import QKV, Layout, Names, read_decoder
from jaxkv.models.spec import ModelSpec, OwnNorm, Scales, Sinusoid

KEYS = gpt2.KEYS | {"intermediate_size": "dff"}
NAMES = Names(
    embed="transformer.w",
    norm="transformer.layernorm",
    layer="transformer.h.{layer}.",
    attn_norm="layernorm1",
    mlp_norm="layernorm2",
    q="multi_head_attention.Wq",
    k="multi_head_attention.Wk",
    v="multi_head_attention.Wv",
    o="multi_head_attention.dense",
    gate=None,
    up="ffn.0",
    down="ffn.2",
)
EPS = 1e-6
"""Of the norms in layers, whatever a config says of the last one."""


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    last = OwnNorm(eps=config.number("layer_norm_epsilon", EPS))
    hidden = config.size("n_embd")
    if hidden % 2:
        raise config.fail("n_embd", "an even number")
    return read_decoder(
        config.replaced(activation="relu", head_dim=None, layer_norm_epsilon=EPS).renamed(**KEYS),
        names=NAMES,
        biased=("attn_norm", "mlp_norm", "norm", *QKV, "o", "up", "down", "head"),
        ropes=[None] * config.size("n_layer", at_most=MAX_LAYERS),
        eps="layer_norm_epsilon",
        activation="activation",
        norm="layer",
        scales=Scales(embed=hidden**0.5, positions=Sinusoid(), norms=(("norm", last),)),
    )
