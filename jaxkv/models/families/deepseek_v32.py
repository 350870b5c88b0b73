"""DeepSeek V3.2: DeepSeek V3, whose tokens choose the keys that they attend to. Source: arXiv
2512.02556.
"""

from __future__ import annotations

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import Layout
from jaxkv.models.families.deepseek_v3 import read_deepseek
from jaxkv.models.families.experts import first_dense, listed_dense
from jaxkv.models.families.latent import read_index
from jaxkv.models.spec import ModelSpec


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    return read_indexed(config, interleaved=False)


def read_indexed(config: ConfigReader, *, interleaved: bool) -> tuple[ModelSpec, Layout]:
    """Reads DeepSeek V3.2, or a family that is alike. interleaved: how index heads are rotated."""
    return read_deepseek(
        config,
        is_dense=listed_dense(config, first_dense(config)),
        index=read_index(config, interleaved=interleaved),
    )
