"""GLM-5: DeepSeek V3.2 by other sizes, index heads rotated interleaved. From GLM-5.2 on most layers
have no index heads, and choose by those of a layer before them. Sources: the models' cards,
zai-org/GLM-5 and zai-org/GLM-5.2; arXiv 2603.12201.
"""

from __future__ import annotations

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import Layout
from jaxkv.models.families.deepseek_v32 import read_indexed
from jaxkv.models.families.latent import every_few, with_shared
from jaxkv.models.spec import ModelSpec


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    found = read_indexed(config, interleaved=True)
    return with_shared(found, config, every_few(config, found[0].num_layers))
