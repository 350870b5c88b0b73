"""OPT: learned positions that begin at the third, LayerNorms before or behind. Source: arXiv
2205.01068.
"""

from __future__ import annotations

from dataclasses import replace

from jaxkv.models.config_reader import MAX_LAYERS, ConfigReader
from jaxkv.models.families.base import QKV, Layout, Leaf, Names, Part, leaf, read_decoder
from jaxkv.models.spec import ModelSpec

NAMES = Names(
    embed="model.decoder.embed_tokens",
    norm="model.decoder.final_layer_norm",
    layer="model.decoder.layers.{layer}.",
    attn_norm="self_attn_layer_norm",
    mlp_norm="final_layer_norm",
    o="self_attn.out_proj",
    gate=None,
    up="fc1",
    down="fc2",
)
FIRST = 2
"""The row of the first position."""


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    config.refuse("word_embed_proj_dim", config.size("hidden_size"))
    config.refuse("do_layer_norm_before", True)
    config.refuse("_remove_final_layer_norm", False)
    biased: tuple[str, ...] = ("attn_norm", "mlp_norm", "norm")
    if not config.flag("layer_norm_elementwise_affine", True):
        raise config.fail(
            "layer_norm_elementwise_affine", "true (norms without weights: not built)"
        )
    biased += (*QKV, "o", "up", "down") * config.flag("enable_bias", True)
    spec, layout = read_decoder(
        config.renamed(intermediate_size="ffn_dim").replaced(num_key_value_heads=None),
        family="opt",
        names=NAMES,
        biased=biased,
        ropes=[None] * config.size("num_hidden_layers", at_most=MAX_LAYERS),
        eps=None,
        activation="activation_function",
        norm="layer",
    )
    table = positions("model.decoder.embed_positions", spec)
    return spec, replace(layout, top={**layout.top, "positions": table})


def positions(name: str, spec: ModelSpec) -> Leaf:
    """Describes the embeddings of positions, the first of which is in row FIRST."""
    shape = (spec.max_len, spec.hidden_size)
    part = Part(shape=(spec.max_len + FIRST, spec.hidden_size), start=FIRST)
    return leaf(f"{name}.weight", shape, (None, "model"), part=part)
