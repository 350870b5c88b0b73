"""MiMo-V2-Flash: values smaller than keys, windows with attention sinks and more KV heads, experts
as DeepSeek V3 chooses them. Source: the model's card, XiaomiMiMo/MiMo-V2-Flash.
"""

from __future__ import annotations

from dataclasses import replace

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import (
    FULL,
    LAYER,
    QKV,
    SLIDING,
    Layout,
    leaf,
    read_decoder,
    read_forms,
)
from jaxkv.models.families.experts import listed_dense, read_grouped
from jaxkv.models.rope_config import read_rope
from jaxkv.models.spec import AttentionSpec, ModelSpec, RopeSpec, Scales


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    num_layers = config.num_layers
    if config.get("sliding_window_size") is not None:  # which does not count the query itself
        config = config.replaced(sliding_window=config.size("sliding_window_size") + 1)
    otherwise = [SLIDING if i and (i + 1) % 6 else FULL for i in range(num_layers)]
    kinds = config.kinds("layer_types", num_layers, (FULL, SLIDING), otherwise)
    dense = listed_dense(config, [0])
    forms = [(kind, layer not in dense) for layer, kind in enumerate(kinds)]
    return read_forms(forms, lambda form: _read_form(config, form, num_layers))


def _read_form(
    config: ConfigReader, form: tuple[str, bool], num_layers: int
) -> tuple[ModelSpec, Layout]:
    kind, is_routed = form
    experts, router = read_grouped(config)
    kv_heads = config.size("num_key_value_heads")
    spec, layout = read_decoder(
        config.replaced(num_key_value_heads=kv_heads * (2 if kind == SLIDING else 1)),
        biased=QKV * config.flag("attention_bias", False),
        kinds=[kind] * num_layers,
        ropes=[_rope(config, kind)] * num_layers,
        value_dim=config.size("v_head_dim", at_most=config.head_dim),
        scales=Scales(values=config.number("attention_value_scale", 1.0)),
        attention=AttentionSpec(has_sinks=True),
        experts=replace(experts, shared=None).leaves if is_routed else None,
        router=router if is_routed else None,
    )
    if kind == SLIDING:
        source = f"{LAYER}self_attn.attention_sink_bias"
        layout = layout.in_each_layer(sinks=leaf(source, (spec.num_heads,), ("heads",)))
    return spec, layout


def _rope(config: ConfigReader, kind: str) -> RopeSpec:
    sections = config.section("rope_parameters")
    if kind not in sections.values:
        sections = ConfigReader({kind: {"rope_theta": 5e6 if kind == FULL else 1e4}}, config.where)
    section = sections.section(kind).with_defaults({"partial_rotary_factor": 0.334})
    return read_rope(config, section, partly=True)
