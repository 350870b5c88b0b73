"""BioGPT: OPT with scaled embeddings and names of its own. Source: arXiv 2210.10341."""

from __future__ import annotations

from dataclasses import replace

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families import opt
from jaxkv.models.families.base import QKV, Layout, read_decoder
from jaxkv.models.spec import ModelSpec, Scales

NAMES = replace(
    opt.NAMES,
    embed="biogpt.embed_tokens",
    norm="biogpt.layer_norm",
    head="output_projection",
    layer="biogpt.layers.{layer}.",
)


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    factor = config.size("hidden_size") ** 0.5 if config.flag("scale_embedding", True) else 1.0
    spec, layout = read_decoder(
        config.replaced(num_key_value_heads=None, head_dim=None),
        names=NAMES,
        biased=("attn_norm", "mlp_norm", "norm", *QKV, "o", "up", "down"),
        ropes=[None] * config.num_layers,
        eps=None,
        norm="layer",
        scales=Scales(embed=factor),
    )
    return spec, layout.with_top(positions=opt.positions("biogpt.embed_positions", spec))
