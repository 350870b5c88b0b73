"""The text part of Granite 4 Vision: Granite. Source: the model's card,
ibm-granite/granite-4.0-3b-vision.
"""

from __future__ import annotations

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families import granite
from jaxkv.models.families.base import Layout
from jaxkv.models.spec import ModelSpec


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    return granite.read(config, family="granite4_vision_text")
