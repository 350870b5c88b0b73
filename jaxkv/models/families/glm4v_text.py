"""The text part of GLM-4.1V and GLM-4.6V: GLM-4, as its rotary embedding is for text alone. Source:
arXiv 2507.01006.
"""

from __future__ import annotations

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import Layout
from jaxkv.models.families.glm4 import read_glm4
from jaxkv.models.spec import ModelSpec


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    return read_glm4(config, has_biases=True)
