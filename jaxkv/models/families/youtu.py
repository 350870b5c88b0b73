"""Youtu-LLM: DeepSeek V3's latent attention in a dense decoder. Source: transformers' Youtu."""

from __future__ import annotations

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import Layout
from jaxkv.models.families.latent import read_latent
from jaxkv.models.spec import ModelSpec


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    is_interleaved = config.flag("rope_interleave", True)
    return read_latent(config, interleaved=is_interleaved)
