"""Granite with windows: attention sinks, and a rotary base of each layer's own. Source: the model's
card, ibm-granite/granite-4.1-3b-base.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import (
    LAYER,
    Layout,
    attn_biased,
    leaf,
    mlp_biased,
    read_decoder,
    read_kinds,
)
from jaxkv.models.families.granite import scales
from jaxkv.models.rope_config import read_rope
from jaxkv.models.spec import AttentionSpec, ModelSpec, RopeSpec


def read(config: ConfigReader, **more: Any) -> tuple[ModelSpec, Layout]:
    """Reads the model, or one that is alike but for what `more` says."""
    biased = attn_biased(config) + mlp_biased(config)
    spec, layout = read_decoder(
        config,
        biased=biased,
        kinds=read_kinds(config, every=4, first_full=True),
        ropes=_ropes(config, config.num_layers),
        attention=AttentionSpec(scale=config.number("attention_multiplier", 1.0), has_sinks=True),
        scales=scales(config),
        **more,
    )
    sinks = leaf(f"{LAYER}self_attn.sinks", (spec.num_heads,), ("heads",))
    return spec, layout.in_each_layer(sinks=sinks)


def _ropes(config: ConfigReader, num_layers: int) -> list[RopeSpec | None]:
    """Reads `layer_rope_theta`, in which 0 or null is a layer that rotates nothing."""
    rope = read_rope(config)
    given = config.get("layer_rope_theta")
    if given is None:
        return [rope] * num_layers
    if not isinstance(given, list) or len(given) != num_layers:
        raise config.fail("layer_rope_theta", f"a list of {num_layers} numbers or nulls")
    one = [ConfigReader({"layer_rope_theta": theta or None}, config.where) for theta in given]
    return [
        replace(rope, theta=reader.number("layer_rope_theta", at_least=1.001))
        if reader.get("layer_rope_theta") is not None
        else None
        for reader in one
    ]
