"""Llama 4: most layers attend within chunks, the others rotate nothing; experts take weighed
inputs. Source: the model's card, meta-llama/Llama-4-Scout-17B-16E-Instruct.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import FULL, Layout, Names, attn_biased, read_decoder, read_forms
from jaxkv.models.families.experts import MAX_EXPERTS, Experts, read_router
from jaxkv.models.families.smollm3 import read_rotates
from jaxkv.models.rope_config import read_rope
from jaxkv.models.spec import AttentionSpec, ModelSpec, QueryTemperature

CHUNKED = "chunked_attention"
NAMES = Names(
    gate="feed_forward.gate_proj", up="feed_forward.up_proj", down="feed_forward.down_proj"
)


class Form(NamedTuple):
    """Says what a layer is."""

    kind: str
    rotates: bool
    is_routed: bool


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    num_layers = config.num_layers
    rotates = read_rotates(
        config.replaced(no_rope_layers=config.get("no_rope_layers") or None), num_layers
    )
    has_chunks = config.get("attention_chunk_size") is not None
    otherwise = [CHUNKED if one and has_chunks else FULL for one in rotates]
    kinds = config.kinds("layer_types", num_layers, (CHUNKED, FULL), otherwise)
    routed = _routed(config, num_layers)
    forms = [Form(*of) for of in zip(kinds, rotates, routed, strict=True)]
    spec, layout = read_forms(forms, lambda form: _read_form(config, form, num_layers))
    unrotated = tuple(layer for layer, one in enumerate(rotates) if not one)
    attention = replace(spec.attention, temperature=_temperature(config, unrotated))
    return replace(spec, attention=attention), layout


def _routed(config: ConfigReader, num_layers: int) -> list[bool]:
    """Reads which layers have experts: those of `moe_layers`, or every so many."""
    if config.get("moe_layers") is None:
        step = config.size("interleave_moe_layer_step", 1)
        return [(layer + 1) % step == 0 for layer in range(num_layers)]
    listed = config.whole_numbers("moe_layers")
    return [layer in listed for layer in range(num_layers)]


def _read_form(config: ConfigReader, form: Form, num_layers: int) -> tuple[ModelSpec, Layout]:
    count = config.size("num_local_experts", at_most=MAX_EXPERTS)
    width = config.size("intermediate_size")
    experts = Experts(
        count=count,
        width=width,
        router="feed_forward.router",
        shared="feed_forward.shared_expert.",
        shared_width=width,
        fused=("feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"),
        transposed=True,
    )
    router = read_router(
        config,
        count,
        used="num_experts_per_tok",
        score="sigmoid",
        of_chosen=True,
        on_input=True,
    )
    rope = read_rope(config, interleaved=True)
    spec, layout = read_decoder(
        config.replaced(intermediate_size=config.size("intermediate_size_mlp")),
        names=NAMES,
        biased=attn_biased(config),
        ropes=[rope if form.rotates else None] * num_layers,
        attention=AttentionSpec(norm_after_rope=True),
        unit_norms=("q_norm", "k_norm") if config.flag("use_qk_norm", True) else (),
        experts=experts.leaves if form.is_routed else None,
        router=router if form.is_routed else None,
    )
    if form.kind == CHUNKED and (chunk := config.size("attention_chunk_size")) < spec.max_len:
        spec = replace(spec, groups=(replace(spec.groups[0], window=chunk, is_chunked=True),))
    return spec, layout


def _temperature(config: ConfigReader, layers: tuple[int, ...]) -> QueryTemperature | None:
    # The first published files have 4 in the place of true.
    is_first = config.get("attn_temperature_tuning") == 4
    is_asked = is_first or config.flag("attn_temperature_tuning", True)
    if not is_asked or not layers:
        return None
    return QueryTemperature(
        beta=config.number("attn_scale", 0.1),
        period=config.number("floor_scale", 8192),
        offset=1,
        layers=layers,
    )
