"""Hunyuan (A13B): the dense one with experts and one that is shared. Source: arXiv 2411.02265."""

from __future__ import annotations

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families import hunyuan_v1_dense
from jaxkv.models.families.base import Layout
from jaxkv.models.families.experts import MAX_EXPERTS, Experts, read_router
from jaxkv.models.spec import ModelSpec


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    config.refuse("use_cla", False)
    config = _alike(config, "moe_topk", "num_experts", "moe_intermediate_size", "num_shared_expert")
    count = config.size("num_experts", at_most=MAX_EXPERTS)
    width = config.size("moe_intermediate_size", config.size("intermediate_size"))
    experts = Experts(
        count=count,
        width=width,
        router="mlp.gate.wg",
        shared="mlp.shared_mlp.",
        shared_width=config.size("num_shared_expert", 1) * width,
    )
    return hunyuan_v1_dense.read(
        config,
        experts=experts.leaves,
        router=read_router(config, count, used="moe_topk", is_normalised=True),
    )


def _alike(config: ConfigReader, *keys: str) -> ConfigReader:
    """Returns a reader that finds one number for keys that may have it for each layer."""
    num_layers = config.num_layers
    for key in keys:
        given = config.get(key)
        if isinstance(given, list):
            if len(given) != num_layers or given.count(given[0]) != num_layers:
                raise config.fail(key, f"a number, or {num_layers} that are equal")
            config = config.replaced(**{key: given[0]})
    return config
