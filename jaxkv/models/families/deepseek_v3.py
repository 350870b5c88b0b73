"""DeepSeek V3 and R1: latent attention, and experts in groups. Source: arXiv 2412.19437."""

from __future__ import annotations

from typing import Any

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import Layout
from jaxkv.models.families.experts import first_dense, read_grouped
from jaxkv.models.families.latent import read_latent
from jaxkv.models.spec import ModelSpec


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    return read_deepseek(config, is_dense=first_dense(config))


def read_deepseek(config: ConfigReader, **more: Any) -> tuple[ModelSpec, Layout]:
    """Reads DeepSeek V3 with what else a family of it has."""
    experts, router = read_grouped(config)
    return read_latent(
        config,
        interleaved=config.flag("rope_interleave", True),
        experts=experts.leaves,
        router=router,
        **more,
    )
