"""Laguna: attention behind softplus gates, windows with a rotary embedding of their own, experts by
sigmoid scores. Source: the model's card, poolside/laguna-XS.2.
"""

from __future__ import annotations

from dataclasses import replace

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import (
    FULL,
    LAYER,
    QK_NORMED,
    SLIDING,
    Layout,
    attn_biased,
    leaf,
    read_decoder,
    read_forms,
)
from jaxkv.models.families.experts import listed_dense, read_router
from jaxkv.models.families.qwen3_moe import read_experts
from jaxkv.models.rope_config import read_rope
from jaxkv.models.spec import AttentionSpec, ModelSpec, RopeSpec

Form = tuple[str, bool, int]
"""Says what a layer sees, whether it has experts, and how many query heads it has."""

ROPES = {
    FULL: {"rope_theta": 500000.0, "partial_rotary_factor": 0.5},
    SLIDING: {"rope_theta": 10000.0},
}


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    num_layers = config.num_layers
    heads = _heads(config, num_layers)
    config.refuse("moe_apply_router_weight_on_input", False)
    kinds = config.kinds("layer_types", num_layers, (FULL, SLIDING), [FULL] * num_layers)
    dense = listed_dense(config, [0])
    forms = [(kind, layer not in dense, heads[layer]) for layer, kind in enumerate(kinds)]
    return read_forms(forms, lambda form: _read_form(config, form, num_layers))


def _heads(config: ConfigReader, num_layers: int) -> list[int]:
    """Reads how many query heads each layer has."""
    key, plain = "num_attention_heads_per_layer", config.size("num_attention_heads")
    given = config.get(key, [plain] * num_layers)
    if not isinstance(given, list) or len(given) != num_layers:
        raise config.fail(key, f"a number for each of the {num_layers} layers")
    return [ConfigReader({key: one}, config.where).size(key) for one in given]


def _read_form(config: ConfigReader, form: Form, num_layers: int) -> tuple[ModelSpec, Layout]:
    kind, is_routed, num_heads = form
    config = config.replaced(num_attention_heads=num_heads)
    experts = replace(
        read_experts(config),
        bias="mlp.experts.e_score_correction_bias",
        shared="mlp.shared_expert.",
        shared_width=config.size("shared_expert_intermediate_size"),
    )
    router = read_router(
        config,
        experts.count,
        used="num_experts_per_tok",
        score="sigmoid",
        is_normalised=True,
        scale=config.number("moe_routed_scaling_factor", 1.0),
        cap=config.number("moe_router_logit_softcapping", 0.0, at_least=0.0),
    )
    spec, layout = read_decoder(
        config,
        names=QK_NORMED,
        biased=attn_biased(config),
        kinds=[kind] * num_layers,
        ropes=[_rope(config, kind)] * num_layers,
        attention=AttentionSpec(gate="softplus"),
        experts=experts.leaves if is_routed else None,
        router=router if is_routed else None,
    )
    given = config.get("gating", True)
    if given is not True and given not in ("per-head", "per-element"):
        raise config.fail("gating", "true, per-head or per-element")
    rows = spec.num_heads * (spec.head_dim if given == "per-element" else 1)
    source = f"{LAYER}self_attn.g_proj.weight"
    gate = leaf(source, (rows, spec.hidden_size), ("heads", "model"))
    spec = replace(spec, groups=(replace(spec.groups[0], num_heads=num_heads),))
    return spec, layout.in_each_layer(attn_gate=gate)


def _rope(config: ConfigReader, kind: str) -> RopeSpec:
    sections = config.section("rope_parameters")
    if kind not in sections.values:
        sections = ConfigReader(ROPES, config.where)
    section = sections.section(kind)
    config = config.replaced(partial_rotary_factor=None)  # what is beside the sections is not read
    return read_rope(config, section, partly=True)
