"""XGLM: OPT's layers with positions that are computed. Source: arXiv 2112.10668."""

from __future__ import annotations

from dataclasses import replace

from jaxkv.models.config_reader import MAX_LAYERS, ConfigReader
from jaxkv.models.families import opt
from jaxkv.models.families.base import LAYER, QKV, Layout, read_decoder
from jaxkv.models.spec import ModelSpec, Scales, Sinusoid

KEYS = {
    "hidden_size": "d_model",
    "num_attention_heads": "attention_heads",
    "num_key_value_heads": "attention_heads",
    "num_hidden_layers": "num_layers",
    "intermediate_size": "ffn_dim",
}
NAMES = replace(opt.NAMES, embed="model.embed_tokens", norm="model.layer_norm", layer=LAYER)


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    config.refuse("add_cross_attention", False)
    config.refuse("pad_token_id", *range(opt.FIRST))  # the position in its row would have no values
    hidden = config.size("d_model")
    if hidden % 2 or hidden < 4:
        raise config.fail("d_model", "an even number from 4 on")
    half = hidden // 2
    # Its frequencies end at 1 / 10,000, where theta**(-2i / hidden) ends before 1 / theta.
    positions = Sinusoid(theta=1e4 ** (half / (half - 1)), offset=opt.FIRST)
    factor = hidden**0.5 if config.flag("scale_embedding", True) else 1.0
    return read_decoder(
        config.replaced(head_dim=None).renamed(**KEYS),
        names=NAMES,
        biased=("attn_norm", "mlp_norm", "norm", *QKV, "o", "up", "down"),
        ropes=[None] * config.size("num_layers", at_most=MAX_LAYERS),
        eps=None,
        activation="activation_function",
        norm="layer",
        scales=Scales(embed=factor, positions=positions),
    )
