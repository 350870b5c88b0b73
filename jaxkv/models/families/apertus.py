"""Apertus: an MLP without a gate whose activation has parameters, xIELU. Source: arXiv
2509.14233.
"""

from __future__ import annotations

from dataclasses import replace

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import LAYER, QK_NORMED, Layout, attn_biased, leaf, read_decoder
from jaxkv.models.spec import ModelSpec
from jaxkv.ops.layers import XIELU


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    names = replace(
        QK_NORMED, attn_norm="attention_layernorm", mlp_norm="feedforward_layernorm", gate=None
    )
    biased = attn_biased(config)
    spec, layout = read_decoder(config, names=names, biased=biased, activations=(XIELU,))
    shapes = {"alpha_p": (1,), "alpha_n": (1,), "beta": (), "eps": ()}
    activation = {
        f"act_{name}": leaf(f"{LAYER}mlp.act_fn.{name}", shape, (None,) * len(shape))
        for name, shape in shapes.items()
    }
    return spec, layout.in_each_layer(**activation)
