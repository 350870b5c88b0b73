"""The text part of GLM-4.5V: GLM-4.5 without norms of queries and keys, as its rotary embedding is
for text alone. Source: arXiv 2507.01006.
"""

from __future__ import annotations

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import Layout
from jaxkv.models.families.glm4_moe import read_glm4_moe
from jaxkv.models.spec import ModelSpec


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    return read_glm4_moe(config.replaced(use_qk_norm=False))
