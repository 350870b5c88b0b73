"""GLM-5: DeepSeek V3.2 by other sizes, index heads rotated interleaved. Source: the model's card,
zai-org/GLM-5.
"""

from __future__ import annotations

from jaxkv.models.config_reader import MAX_LAYERS, ConfigReader
from jaxkv.models.families.base import Layout
from jaxkv.models.families.deepseek_v32 import read_indexed
from jaxkv.models.spec import ModelSpec


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    num_layers = config.size("num_hidden_layers", at_most=MAX_LAYERS)
    # Layers that take over what the one before has chosen are not built.
    config.refuse("indexer_types", ["full"] * num_layers)
    config.refuse("index_topk_pattern", "F" * num_layers, ["full"] * num_layers)
    config.refuse("index_topk_freq", 1)
    return read_indexed(config, family="glm_moe_dsa", interleaved=True)
