"""CWM: Llama with a window in three of four layers. Source: arXiv 2510.02387."""

from __future__ import annotations

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import Layout, mlp_biased, read_decoder, read_kinds
from jaxkv.models.spec import ModelSpec


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    return read_decoder(
        config,
        biased=mlp_biased(config),
        kinds=read_kinds(config, every=4, first_full=True),
    )
