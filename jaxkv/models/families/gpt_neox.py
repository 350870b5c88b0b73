"""GPT-NeoX and Pythia: attention and MLP side by side, partly rotated heads, weights fused by head.
Source: arXiv 2204.06745, 2304.01373.
"""

from __future__ import annotations

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import Layout, Names, attn_biased, read_decoder
from jaxkv.models.spec import ModelSpec

NAMES = Names(
    embed="gpt_neox.embed_in",
    norm="gpt_neox.final_layer_norm",
    head="embed_out",
    layer="gpt_neox.layers.{layer}.",
    qkv="attention.query_key_value",
    o="attention.dense",
    gate=None,
    up="mlp.dense_h_to_4h",
    down="mlp.dense_4h_to_h",
)


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    # Beside `rope_parameters` the rotated part and its base have names of their own.
    theta, part = config.get("rotary_emb_base", 10000.0), config.get("rotary_pct", 0.25)
    config = config.replaced(rope_theta=theta, partial_rotary_factor=part)
    biased = ("attn_norm", "mlp_norm", "norm", "up", "down")
    spec, layout = read_decoder(
        config.replaced(num_key_value_heads=None),
        partly=True,
        names=NAMES,
        biased=biased + attn_biased(config, default=True),
        fused_by_head=True,
        eps="layer_norm_eps",
        norm="layer",
        is_parallel=config.flag("use_parallel_residual", True),
    )
    masks = r"gpt_neox\.layers\.\d+\.attention\.(masked_)?bias"
    return spec, layout.with_unread(masks)
