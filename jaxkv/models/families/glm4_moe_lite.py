"""GLM-4.7-Flash: GLM-4.5's experts beside latent attention. Source: transformers' Glm4MoeLite."""

from __future__ import annotations

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import Layout
from jaxkv.models.families.deepseek_v3 import read_deepseek
from jaxkv.models.families.experts import listed_dense
from jaxkv.models.spec import ModelSpec


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    return read_deepseek(config, is_dense=listed_dense(config, (0,)))
