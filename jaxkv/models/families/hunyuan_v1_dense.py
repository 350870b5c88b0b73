"""Hunyuan (dense): Llama with norms on heads that are rotated already. Source: arXiv 2411.02265."""

from __future__ import annotations

from typing import Any

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import Layout, Names, attn_biased, read_decoder
from jaxkv.models.rope_config import rope_section
from jaxkv.models.spec import AttentionSpec, ModelSpec


def read(config: ConfigReader, **more: Any) -> tuple[ModelSpec, Layout]:
    """Reads the model, or one that is alike but for what `more` says."""
    return read_decoder(
        _with_alpha(config),
        names=Names(q_norm="self_attn.query_layernorm", k_norm="self_attn.key_layernorm"),
        biased=attn_biased(config),
        attention=AttentionSpec(norm_after_rope=True),
        **more,
    )


def _with_alpha(config: ConfigReader) -> ConfigReader:
    """Returns the config without an `alpha`, in whose place it has the larger base that it means,
    for sequences of any length; such files call that "dynamic".
    """
    rope = rope_section(config)
    kind = rope.get("rope_type", rope.get("type"))
    if kind != "dynamic" or not rope.get("alpha"):
        return config
    head_dim = config.head_dim
    theta = rope.number("rope_theta", config.number("rope_theta", 10000.0))
    if head_dim > 2:  # else nothing is rotated by less than a whole turn
        theta *= rope.number("alpha") ** (head_dim / (head_dim - 2))
    given = {"rope_type": "default", "rope_theta": theta}
    return config.replaced(rope_parameters=given, rope_scaling=None)
