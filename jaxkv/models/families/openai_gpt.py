"""GPT (the first): GPT-2's tensors, with norms of what joins the stream in place of those before
blocks. Source: Radford et al., Improving Language Understanding by Generative Pre-Training (2018).
"""

from __future__ import annotations

from dataclasses import replace

from jaxkv.models.config_reader import MAX_LAYERS, ConfigReader
from jaxkv.models.families import gpt2
from jaxkv.models.families.base import QKV, Layout, read_decoder
from jaxkv.models.families.opt import with_norms_behind
from jaxkv.models.spec import ModelSpec

NAMES = replace(
    gpt2.NAMES,
    embed="transformer.tokens_embed",
    positions="transformer.positions_embed",
    norm=None,
)
ACTIVATIONS = {"relu": "relu", "silu": "silu", "gelu": "gelu_new", "swish": "silu"}
"""What transformers takes for the names that a config may have."""


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    activation = ACTIVATIONS[config.choice("afn", "gelu", ACTIVATIONS)]
    config = config.replaced(afn=activation, n_inner=4 * config.size("n_embd"))
    spec, layout = read_decoder(
        config.renamed(**gpt2.KEYS),
        names=NAMES,
        biased=("attn_norm", *QKV, "o", "mlp_norm", "up", "down"),
        ropes=[None] * config.size("n_layer", at_most=MAX_LAYERS),
        transposed=True,
        eps="layer_norm_epsilon",
        activation="afn",
        norm="layer",
    )
    return spec, with_norms_behind(layout).with_unread(gpt2.MASKS)
