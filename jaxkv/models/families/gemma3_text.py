"""Gemma 3: five layers with a window and a rotary embedding of their own for each that sees all.
Source: arXiv 2503.19786.
"""

from __future__ import annotations

from dataclasses import replace

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import (
    FULL,
    SANDWICH,
    SLIDING,
    Layout,
    attn_biased,
    read_decoder,
    read_kinds,
)
from jaxkv.models.families.gemma2 import scales
from jaxkv.models.rope_config import read_layer_ropes
from jaxkv.models.spec import ModelSpec, RopeSpec


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    config.refuse("use_bidirectional_attention", False)
    config.refuse("attn_logit_softcapping")  # transformers reads it and caps nothing
    pattern = config.size("sliding_window_pattern", 6)
    kinds = read_kinds(config, every=pattern)
    return read_decoder(
        config,
        names=replace(SANDWICH, q_norm="self_attn.q_norm", k_norm="self_attn.k_norm"),
        biased=attn_biased(config),
        kinds=kinds,
        ropes=read_window_ropes(
            config, kinds, theta=1e6, local=config.number("rope_local_base_freq", 1e4)
        ),
        **scales(config),
    )


def read_scaling(config: ConfigReader) -> ConfigReader:
    """Reads `rope_scaling` in a family that has an embedding for each kind of layers.

    Raises: CheckpointError for the older key `type`, which means nothing to transformers there.
    """
    found = config.section("rope_scaling")
    if "type" in found.values and "rope_type" not in found.values:
        raise found.fail("rope_type", "the kind of embedding (transformers ignores `type` here)")
    return found


def read_window_ropes(
    config: ConfigReader, kinds: list[str], *, theta: float, local: float
) -> tuple[RopeSpec, ...]:
    """Reads each layer's embedding. Older files say under `rope_scaling` and `rope_theta` what it
    is in layers that see everything, and never scale that of layers with a window.

    theta, local: what is taken where a file has no theta for the one or for the other.
    """
    config = config.with_defaults({"rope_theta": theta})
    sections = config.section("rope_parameters")
    if not {FULL, SLIDING} & sections.values.keys():
        if sections.values:
            raise config.fail("rope_parameters", f"sections {FULL} and {SLIDING}")
        wide = read_scaling(config)
        sections = ConfigReader({FULL: wide.values}, config.where)
        config = config.replaced(rope_scaling=None)
    windows = {"rope_theta": local, **sections.section(SLIDING).values}
    given = {FULL: sections.section(FULL).values, SLIDING: windows}
    config = config.replaced(rope_parameters=given)
    return read_layer_ropes(config, kinds)
