"""The text part of Hunyuan-VL: Hunyuan (dense), as its rotary embedding is for text alone. Source:
arXiv 2511.19575.
"""

from __future__ import annotations

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families import hunyuan_v1_dense
from jaxkv.models.families.base import Layout
from jaxkv.models.rope_config import rope_section
from jaxkv.models.spec import ModelSpec


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    rope = rope_section(config)
    if "xdrope" in (rope.get("rope_type"), rope.get("type")):  # what published files call it
        given = {**rope.values, "rope_type": "dynamic", "type": "dynamic"}
        config = config.replaced(rope_parameters=given, rope_scaling=None)
    return hunyuan_v1_dense.read(config)
