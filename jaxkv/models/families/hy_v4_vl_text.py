"""The text part of Hunyuan V4 with pictures: Hunyuan V4 that rotates neighbours in pairs, whose
norms inside of latent attention have the eps of the others. Source: transformers' hy_v4_vl.
"""

from __future__ import annotations

from dataclasses import replace

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families import hy_v4
from jaxkv.models.families.base import Layout
from jaxkv.models.spec import ModelSpec


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    spec, layout = hy_v4.read(config, interleaved=True)
    attention = replace(spec.attention, latent_eps=spec.norm_eps)
    return replace(spec, attention=attention), layout
