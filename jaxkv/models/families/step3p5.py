"""Step 3.5, and the text part of Step 3.7: layers with a window have query heads and a rotary
embedding of their own, a gate for each head, experts by sigmoid scores, and bounds on gates of some
layers. Source: the model's card, stepfun-ai/Step-3.5-Flash.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import (
    FULL,
    LAYER,
    QK_NORMED,
    SLIDING,
    Layout,
    Leaf,
    Part,
    attn_biased,
    leaf,
    read_decoder,
    read_forms,
)
from jaxkv.models.families.experts import MAX_EXPERTS, ROUTED, Experts, listed_dense, read_router
from jaxkv.models.rope_config import read_rope
from jaxkv.models.spec import AttentionSpec, GateLimits, ModelSpec, RopeSpec

ALWAYS = {
    "use_head_wise_attn_gate": True,
    "use_qk_norm": True,
    "zero_centered": True,
    "sink": False,
    "use_moe_router_bias": True,
    "moe_router_activation": "sigmoid",
    "norm_expert_weight": True,
    "mlp_bias": False,
}
"""Published files say this of what all these models have, or have not."""

BY_LAYER = (
    *("layer_types", "mlp_layer_types", "swiglu_limits", "swiglu_limits_shared"),
    *("rope_theta", "partial_rotary_factors"),
)


class Form(NamedTuple):
    """Says what a layer is."""

    kind: str
    is_routed: bool
    num_heads: int


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    for key, value in ALWAYS.items():
        config.refuse(key, value)
    num_layers = config.num_layers
    config = _without_predictors(config, num_layers)
    kinds = config.kinds("layer_types", num_layers, (FULL, SLIDING), [FULL] * num_layers)
    heads, dense = _heads(config, kinds), _dense(config, num_layers)
    forms = [Form(kind, i not in dense, heads[i]) for i, kind in enumerate(kinds)]
    limits = GateLimits(
        dense=_limits(config, "swiglu_limits_shared", num_layers),
        routed=_limits(config, "swiglu_limits", num_layers),
        shared=_limits(config, "swiglu_limits_shared", num_layers),
        of_act=True,
    )
    spec, layout = read_forms(forms, lambda form: _read_form(config, form, kinds))
    return replace(spec, scales=replace(spec.scales, limits=limits)), layout


def _without_predictors(config: ConfigReader, num_layers: int) -> ConfigReader:
    """Returns the config without what lists say of layers that predict later tokens."""
    count = config.get("num_nextn_predict_layers", 0)
    cut = {
        key: given[:num_layers]
        for key in BY_LAYER
        if isinstance(given := config.get(key), list) and len(given) - num_layers == count
    }
    return config.replaced(**cut)


def _heads(config: ConfigReader, kinds: list[str]) -> list[int]:
    """Reads how many query heads each layer has: as many in each that has a window."""
    plain = config.size("num_attention_heads")
    near = config.section("attention_other_setting").size("num_attention_heads", plain)
    near = config.size("num_sliding_attention_heads", near)
    found = [near if kind == SLIDING else plain for kind in kinds]
    each = config.by_layer("per_layer_config", ["num_attention_heads"])
    return [own.size("num_attention_heads", one) for own, one in zip(each, found, strict=True)]


def _dense(config: ConfigReader, num_layers: int) -> list[int]:
    """Reads which layers have no experts: `moe_layers_enum` lists the others, or a text does."""
    key = "moe_layers_enum"
    given: Any = config.get(key, list(range(3, num_layers)))
    listed = given.split(",") if isinstance(given, str) else given
    texts = [str(one).strip() for one in listed] if isinstance(listed, list) else [""]
    if not all(text.isdecimal() and len(text) <= 6 for text in texts):
        raise config.fail(key, "a list of layers, or a text with commas between them")
    routed = {int(text) for text in texts}
    return [*listed_dense(config, [i for i in range(num_layers) if i not in routed])]


def _limits(config: ConfigReader, key: str, num_layers: int) -> tuple[float, ...]:
    """Reads the bound of each layer, 0 for none."""
    given = config.get(key, [0.0] * num_layers)
    if not isinstance(given, list) or len(given) != num_layers:
        raise config.fail(key, f"a number or null for each of the {num_layers} layers")
    ones = (ConfigReader({key: one}, config.where) for one in given)
    return tuple(one.number(key, 0.0, at_least=0.0) for one in ones)


def _read_form(config: ConfigReader, form: Form, kinds: list[str]) -> tuple[ModelSpec, Layout]:
    """Reads the model as if all its layers were of a form."""
    count = config.size("n_routed_experts", at_most=MAX_EXPERTS)
    head_dim = config.size("head_dim")
    router = read_router(
        config,
        count,
        used="num_experts_per_tok",
        score="sigmoid",
        is_normalised=True,
        scale=config.number("moe_router_scaling_factor", 1.0),
    )
    config = config.replaced(num_attention_heads=form.num_heads)
    spec, layout = read_decoder(
        config,
        names=QK_NORMED,
        biased=attn_biased(config),
        kinds=[form.kind] * len(kinds),
        ropes=[_rope(config, form.kind, kinds)] * len(kinds),
        norm="rms_one",
        attention=AttentionSpec(scale=config.number("query_pre_attn_scalar", head_dim) ** -0.5),
        experts=(lambda *of: _experts(config, count, *of)) if form.is_routed else None,
        router=router if form.is_routed else None,
    )
    source = f"{LAYER}self_attn.g_proj.weight"
    gate = leaf(source, (form.num_heads, spec.hidden_size), ("heads", "model"))
    spec = replace(spec, groups=(replace(spec.groups[0], num_heads=form.num_heads),))
    return spec, layout.in_each_layer(attn_gate=gate)


def _experts(config: ConfigReader, count: int, prefix: str, hidden: int) -> Mapping[str, Leaf]:
    """Describes the experts of a layer, all in one tensor for each of their matrices."""
    found = Experts(
        count=count,
        width=config.size("moe_intermediate_size"),
        router="moe.gate",
        one="moe.",
        bias="moe.router_bias",
        shared="share_expert.",
        shared_width=config.size("share_expert_dim"),
    ).leaves(prefix, hidden)
    return {
        name: replace(one, part=Part(shape=(count, *one.info.shape), of_all=True))
        if name.startswith(ROUTED)
        else one
        for name, one in found.items()
    }


def _rope(config: ConfigReader, kind: str, kinds: list[str]) -> RopeSpec:
    """Reads the embedding of layers of a kind: its section, or what lists say of its first layer;
    only layers without a window are scaled.
    """
    sections, first = config.section("rope_parameters"), kinds.index(kind)
    if kind in sections.values:
        section = sections.section(kind)
    else:
        given = {"rope_theta": 10000.0}
        for key, own in (("rope_theta",) * 2, ("partial_rotary_factors", "partial_rotary_factor")):
            if (listed := config.get(key)) is None:
                continue
            if isinstance(listed, list) and len(listed) != len(kinds):
                raise config.fail(key, f"a number for each of the {len(kinds)} layers")
            given[own] = listed[first] if isinstance(listed, list) else listed
        scaling = config.section("rope_scaling").values if kind == FULL else {}
        section = ConfigReader({**given, **scaling}, config.where)
    config = config.replaced(partial_rotary_factor=None, rope_scaling=None, rope_theta=None)
    return read_rope(config, section, partly=True)
