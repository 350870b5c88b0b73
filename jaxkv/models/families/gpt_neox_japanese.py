"""GPT-NeoX Japanese: GPT-NeoX with MLPs behind attention and no biases but one, of attention in the
last layer. Source: the model's card, abeja/gpt-neox-japanese-2.7b.
"""

from __future__ import annotations

from dataclasses import replace

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import Layout, leaf, read_decoder, read_forms
from jaxkv.models.families.gpt_neox import NAMES
from jaxkv.models.spec import ModelSpec

PREFIX = "gpt_neox_japanese"
OWN_NAMES = replace(
    NAMES,
    embed=f"{PREFIX}.embed_in",
    norm=f"{PREFIX}.final_layer_norm",
    layer=f"{PREFIX}.layers.{{layer}}.",
)


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    num_layers = config.num_layers
    theta, part = config.get("rotary_emb_base", 10000.0), config.get("rotary_pct", 1.0)
    width = config.size("hidden_size") * config.size("intermediate_multiple_size", 4)
    config = config.replaced(
        rope_theta=theta,
        partial_rotary_factor=part,
        num_key_value_heads=None,
        intermediate_size=width,
    )

    def read_form(is_last: bool) -> tuple[ModelSpec, Layout]:
        spec, layout = read_decoder(
            config,
            partly=True,
            names=OWN_NAMES,
            biased=("attn_norm", "mlp_norm", "norm"),
            fused_by_head=True,
            eps="layer_norm_eps",
            norm="layer",
        )
        if not is_last:
            return spec, layout
        source = f"{OWN_NAMES.layer}attention.dense_bias"
        return spec, layout.in_each_layer(o_bias=leaf(source, (spec.hidden_size,), ("model",)))

    return read_forms([layer == num_layers - 1 for layer in range(num_layers)], read_form)
