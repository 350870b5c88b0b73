"""A.X-K1: DeepSeek V3 with a norm behind its experts. Source: transformers' AXK1."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import LAYER, Layout, leaf
from jaxkv.models.families.deepseek_v3 import read_deepseek
from jaxkv.models.families.experts import first_dense, listed_dense
from jaxkv.models.spec import ModelSpec


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    spec, layout = read_deepseek(config, is_dense=read_dense(config))
    source = f"{LAYER}post_mlp_layernorm.weight"
    norm = {"post_mlp_norm": leaf(source, (spec.hidden_size,), ("model",))}
    layers = tuple({**one, **norm} if "router" in one else one for one in layout.layers)
    unused = r"model\.layers\.\d+\.post_mlp_layernorm\.weight"  # of layers without experts
    return spec, replace(layout, layers=layers).with_unread(unused)


def read_dense(config: ConfigReader) -> Collection[int]:
    """Lists the layers without experts: the first one, and all but every `moe_layer_freq`th, where
    `mlp_layer_types` and `first_k_dense_replace` say no other.
    """
    config = config.with_defaults({"first_k_dense_replace": 1})
    every, first = config.size("moe_layer_freq", 1), first_dense(config)
    return listed_dense(config, [i for i in range(config.num_layers) if i in first or i % every])
