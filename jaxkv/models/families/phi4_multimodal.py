"""The text part of Phi-4-multimodal: Phi-3, beside what turns images and sound into embeddings.
Source: arXiv 2503.01743.
"""

from __future__ import annotations

from dataclasses import replace

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families import phi3
from jaxkv.models.families.base import Layout
from jaxkv.models.spec import ModelSpec


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    # Its keys are those of the whole model, which has no `text_config`.
    spec, layout = phi3.read(config)
    return spec, replace(layout, part_of="phi4_multimodal")
