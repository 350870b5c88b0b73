"""MiniCPM3: MiniCPM with latent attention. Source: transformers' MiniCPM3."""

from __future__ import annotations

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import Layout, mlp_biased
from jaxkv.models.families.latent import read_latent
from jaxkv.models.families.minicpm import read_scales
from jaxkv.models.spec import ModelSpec


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    return read_latent(
        config,
        interleaved=False,
        biased=mlp_biased(config),
        scales=read_scales(config),
    )
