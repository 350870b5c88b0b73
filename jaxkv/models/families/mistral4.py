"""Mistral Small 4: latent attention whose queries grow with their position, and experts, all of a
layer in one tensor. Source: transformers' Mistral4.
"""

from __future__ import annotations

from dataclasses import replace

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import Layout
from jaxkv.models.families.experts import first_dense, read_grouped
from jaxkv.models.families.latent import read_latent
from jaxkv.models.families.ministral3 import read_temperature
from jaxkv.models.spec import ModelSpec


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    experts, router = read_grouped(config)
    fused = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
    return read_latent(
        config,
        interleaved=config.flag("rope_interleave", True),
        temperature=read_temperature(config),
        experts=replace(experts, bias=None, fused=fused).leaves,
        is_dense=first_dense(config),
        router=replace(router, score="softmax"),
    )
