"""The text part of GLM-OCR: that of GLM-4.1V without biases. Source: the model's card,
zai-org/GLM-OCR.
"""

from __future__ import annotations

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import Layout
from jaxkv.models.families.glm4 import read_glm4
from jaxkv.models.spec import ModelSpec


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    return read_glm4(config, has_biases=False)
