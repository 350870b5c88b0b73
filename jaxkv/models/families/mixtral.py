"""Mixtral: Mistral with experts in place of every MLP. Source: arXiv 2401.04088."""

from __future__ import annotations

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import Layout, mistral_kinds, read_decoder
from jaxkv.models.families.experts import read_mixtral, read_router
from jaxkv.models.spec import ModelSpec


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    experts = read_mixtral(config)
    router = read_router(config, experts.count, used="num_experts_per_tok", is_normalised=True)
    return read_decoder(config, kinds=mistral_kinds(config), experts=experts.leaves, router=router)
