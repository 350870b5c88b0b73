"""FalconMamba: Mamba with norms without weights inside. Source: arXiv 2410.05355."""

from __future__ import annotations

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import Layout
from jaxkv.models.families.mamba import read_mamba_model
from jaxkv.models.spec import ModelSpec


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    norm_eps = config.number("mixer_rms_eps", 1e-6)
    return read_mamba_model(config, norm_eps=norm_eps)
