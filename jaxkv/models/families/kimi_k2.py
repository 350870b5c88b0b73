"""Kimi K2: DeepSeek V3 under a name of its own. Source: arXiv 2507.20534."""

from __future__ import annotations

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import Layout
from jaxkv.models.families.deepseek_v3 import read_deepseek
from jaxkv.models.families.experts import first_dense
from jaxkv.models.spec import ModelSpec


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    return read_deepseek(config, family="kimi_k2", is_dense=first_dense(config))
