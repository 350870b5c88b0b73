"""Granite 3 and 4 (dense): Llama with factors on embeddings, attention, what joins the stream and
logits. Source: arXiv 2408.13359 (the factors).
"""

from __future__ import annotations

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import Layout, attn_biased, mlp_biased, read_decoder
from jaxkv.models.spec import AttentionSpec, ModelSpec, Scales


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    biased = attn_biased(config) + mlp_biased(config)
    return read_decoder(
        config,
        biased=biased,
        attention=AttentionSpec(scale=config.number("attention_multiplier", 1.0)),
        scales=scales(config),
    )


def scales(config: ConfigReader) -> Scales:
    """Reads the factors on embeddings, what joins the stream, and logits."""
    return Scales(
        embed=config.number("embedding_multiplier", 1.0),
        residual=config.number("residual_multiplier", 1.0),
        logits=1 / config.number("logits_scaling", 1.0),
    )
