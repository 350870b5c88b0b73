"""Gemma 2: norms on both sides, every other layer with a window, capped logits. Source: arXiv
2408.00118.
"""

from __future__ import annotations

from typing import Any

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import SANDWICH, Layout, attn_biased, read_decoder, read_kinds
from jaxkv.models.spec import AttentionSpec, ModelSpec, Scales


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    config.refuse("use_bidirectional_attention", False)
    return read_decoder(
        config,
        names=SANDWICH,
        biased=attn_biased(config),
        kinds=read_kinds(config, every=2),
        **scales(config),
    )


def scales(config: ConfigReader) -> dict[str, Any]:
    """Reads what Gemma 2 and those after it do to numbers on their way."""
    return {
        "activation": "hidden_activation",
        "norm": "rms_one",
        "scales": Scales(
            embed=config.size("hidden_size") ** 0.5,
            embed_is_rounded=True,
            logit_cap=config.cap("final_logit_softcapping"),
        ),
        "attention": AttentionSpec(
            scale=config.number("query_pre_attn_scalar") ** -0.5,
            cap=config.cap("attn_logit_softcapping"),
        ),
    }
