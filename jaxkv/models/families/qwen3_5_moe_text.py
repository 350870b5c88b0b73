"""The text part of Qwen3.5 with experts. Source: the model's card, Qwen/Qwen3.5-35B-A3B."""

from __future__ import annotations

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import Layout
from jaxkv.models.families.qwen3_5_text import in_turn
from jaxkv.models.families.qwen3_next import read_qwen_hybrid
from jaxkv.models.spec import ModelSpec


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    # No layer has an MLP in place of experts, so none of its size is in the config.
    width = config.size("moe_intermediate_size")
    return read_qwen_hybrid(
        config.replaced(intermediate_size=width),
        matrices=in_turn,
        is_dense=(),
    )
