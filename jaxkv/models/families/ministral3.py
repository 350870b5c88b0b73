"""Ministral 3: Mistral stretched by YaRN, whose queries grow with their position. Source: arXiv
2601.08584.
"""

from __future__ import annotations

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import Layout, mistral_kinds, read_decoder
from jaxkv.models.rope_config import rope_section
from jaxkv.models.spec import AttentionSpec, ModelSpec, QueryTemperature


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    return read_decoder(
        config,
        kinds=mistral_kinds(config),
        attention=AttentionSpec(temperature=read_temperature(config)),
    )


def read_temperature(config: ConfigReader) -> QueryTemperature | None:
    """Reads how queries grow with their position; None where they do not."""
    rope = rope_section(config)
    if not rope.get("llama_4_scaling_beta"):
        return None
    return QueryTemperature(
        beta=rope.number("llama_4_scaling_beta"),
        period=rope.number(
            "original_max_position_embeddings", config.size("max_position_embeddings")
        ),
    )
