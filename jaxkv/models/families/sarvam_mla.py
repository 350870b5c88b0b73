"""Sarvam's mixture of experts with latent attention: DeepSeek V3 by other names. Source:
transformers' SarvamMLA.
"""

from __future__ import annotations

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import Layout
from jaxkv.models.families.deepseek_v3 import read_deepseek
from jaxkv.models.families.experts import first_dense
from jaxkv.models.spec import ModelSpec

OLDER = {"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"}


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    given = {key: config.get(old) for old, key in OLDER.items() if config.get(old) is not None}
    scaling = config.section("rope_scaling")
    if scaling.get("type") == "deepseek_yarn" or scaling.get("rope_type") == "deepseek_yarn":
        given["rope_scaling"] = {**scaling.values, "type": "yarn", "rope_type": "yarn"}
    config = config.replaced(**given)
    return read_deepseek(config, is_dense=first_dense(config))
