"""Gemma 4: heads of two sizes, layers that attend to what others stored, inputs of each layer's
own, experts beside an MLP. Source: the model's card, google/gemma-4-E2B-it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import (
    FULL,
    LAYER,
    SANDWICH,
    Layout,
    Leaf,
    attn_biased,
    leaf,
    read_decoder,
    read_forms,
    read_kinds,
)
from jaxkv.models.families.experts import MAX_EXPERTS, Experts, read_router
from jaxkv.models.rope_config import read_rope
from jaxkv.models.spec import AttentionSpec, ModelSpec, RopeSpec, Scales
from jaxkv.ops.experts import Router

OF_KEYS = ("k", "k_bias", "k_norm", "v", "v_bias")
"""Leaves that layers which attend to another's keys and values do not have."""

NAMES = replace(SANDWICH, q_norm="self_attn.q_norm", k_norm="self_attn.k_norm")


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    """Reads the model, or one that is alike but for its name."""
    config.refuse("use_bidirectional_attention", False, "vision")
    kinds = read_kinds(config, every=6)
    kinds[-1] = FULL
    sources = read_sources(config, kinds)
    forms = [
        (kind, source != layer)
        for layer, (kind, source) in enumerate(zip(kinds, sources, strict=True))
    ]
    spec, layout = read_forms(forms, lambda form: _read_form(config, form, kinds))
    has_own = config.size("hidden_size_per_layer_input", 0, at_least=0) > 0
    own_top, own_layer = own_inputs(config, config.num_layers) if has_own else ({}, {})
    own_layer["scalar"] = leaf(f"{LAYER}layer_scalar", (1,), (None,))
    layout = layout.in_each_layer(**own_layer).with_top(**own_top)
    # transformers drops what shared layers would have.
    return with_sources(spec, sources), layout.with_unread(*unused_keys(sources))


def _read_form(
    config: ConfigReader, form: tuple[str, bool], kinds: Sequence[str]
) -> tuple[ModelSpec, Layout]:
    """Reads the layers of one form as if they were the whole model: with full attention or a
    window, with keys and values of another layer or their own.
    """
    kind, is_shared = form
    head_dim, kv_heads = _sizes(config, kinds, kind)
    width = config.size("intermediate_size")
    is_wide = is_shared and config.flag("use_double_wide_mlp", False)
    experts, router = _experts(config) if config.flag("enable_moe_block", False) else ({}, None)
    spec, layout = read_decoder(
        config.replaced(
            head_dim=head_dim,
            num_key_value_heads=kv_heads,
            intermediate_size=2 * width if is_wide else width,
        ),
        names=NAMES,
        biased=attn_biased(config),
        kinds=[kind] * len(kinds),
        ropes=[_rope(config, kind)] * len(kinds),
        activation="hidden_activation",
        scales=Scales(
            embed=config.size("hidden_size") ** 0.5,
            embed_is_rounded=True,
            logit_cap=config.cap("final_logit_softcapping"),
        ),
        unit_norms=("v_norm",),
        attention=AttentionSpec(scale=1.0),
        router=router,
    )
    left_out: tuple[str, ...] = ()
    if is_shared:
        left_out = OF_KEYS
    elif kind == FULL and config.flag("attention_k_eq_v", False):
        left_out = ("v", "v_bias")
    leaves = {name: one for name, one in layout.layers[0].items() if name not in left_out}
    return spec, replace(layout, layers=({**leaves, **experts},))


def _experts(config: ConfigReader) -> tuple[dict[str, Leaf], Router]:
    """Lists the tensors of the experts beside a layer's MLP, and reads how they are chosen."""
    count, hidden = config.size("num_experts", at_most=MAX_EXPERTS), config.size("hidden_size")
    experts = Experts(
        count=count,
        width=config.size("moe_intermediate_size"),
        router="router.proj",
        fused=("experts.gate_up_proj", "experts.down_proj"),
    )
    norms = {
        "router_norm": "router.scale",
        "routed_norm": "pre_feedforward_layernorm_2.weight",
        "post_routed_norm": "post_feedforward_layernorm_2.weight",
        "post_dense_norm": "post_feedforward_layernorm_1.weight",
    }
    leaves = experts.leaves(LAYER, hidden) | {
        name: leaf(f"{LAYER}{source}", (hidden,), ("model",)) for name, source in norms.items()
    }
    leaves["router_gain"] = leaf(f"{LAYER}router.per_expert_scale", (count,), ("experts",))
    router = read_router(
        config, count, used="top_k_experts", is_normalised=True, logit_scale=hidden**-0.5
    )
    return leaves, router


def _sizes(config: ConfigReader, kinds: Sequence[str], kind: str) -> tuple[int, int]:
    """Reads (head_dim, KV heads) of the layers of a kind, which `per_layer_config` may have by
    their numbers, and older files under names for all with full attention.
    """
    own: set[tuple[int, int]] = set()
    each = config.by_layer("per_layer_config", ("head_dim", "num_key_value_heads"))
    dim, heads = config.size("head_dim"), config.size("num_key_value_heads")
    if kind == FULL and config.get("per_layer_config") is None:  # an empty one says: all alike
        dim = config.size("global_head_dim", 512)
        if config.flag("attention_k_eq_v", False):
            heads = config.size("num_global_key_value_heads", heads)
    for reader, other in zip(each, kinds, strict=True):
        if other == kind:
            own.add((reader.size("head_dim", dim), reader.size("num_key_value_heads", heads)))
    if any(dim % 2 for dim, _ in own):
        raise config.fail("head_dim", "an even number (rotary embedding pairs dimensions)")
    if len(own) > 1:
        raise config.fail("per_layer_config", f"equal heads in all layers of {kind}")
    return own.pop()


def read_sources(config: ConfigReader, kinds: Sequence[str]) -> tuple[int, ...]:
    """Returns for each layer the one whose keys and values it attends to: the last ones share those
    of the last layer of their kind that has its own.
    """
    num_shared = config.size("num_kv_shared_layers", 0, at_least=0)
    own = kinds[: len(kinds) - num_shared]
    if set(own) != set(kinds):
        raise config.fail("num_kv_shared_layers", "a layer of each kind that has its own")
    last = {kind: layer for layer, kind in enumerate(own)}
    return tuple(layer if layer < len(own) else last[kind] for layer, kind in enumerate(kinds))


def with_sources(spec: ModelSpec, sources: tuple[int, ...]) -> ModelSpec:
    """Returns the model with keys and values in those layers only that attend to their own."""
    groups = (
        replace(group, layers=tuple(layer for layer in group.layers if sources[layer] == layer))
        for group in spec.groups
    )
    has_shared = sources != tuple(range(spec.num_layers))
    attention = replace(spec.attention, kv_sources=sources if has_shared else ())
    return replace(spec, groups=tuple(groups), attention=attention)


def _rope(config: ConfigReader, kind: str) -> RopeSpec:
    sections = config.section("rope_parameters")
    if kind not in sections.values:
        given: dict[str, Any] = {"rope_theta": 1e4}
        if kind == FULL:
            given = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}
        sections = ConfigReader({kind: given}, config.where)
    # The size of heads decides nothing here: all of each is rotated.
    return read_rope(config, sections.section(kind), head_dim=2)


def own_inputs(config: ConfigReader, num_layers: int) -> tuple[dict[str, Leaf], dict[str, Leaf]]:
    """Lists the tensors that make what each layer gets beside the stream, and use it."""
    hidden, width = config.size("hidden_size"), config.size("hidden_size_per_layer_input")
    vocab, total = config.size("vocab_size_per_layer_input"), num_layers * width
    top = {
        "own_embed": leaf("model.embed_tokens_per_layer.weight", (vocab, total), (None, None)),
        "own_proj": leaf(
            "model.per_layer_model_projection.weight", (total, hidden), (None, "model")
        ),
        "own_norm": leaf("model.per_layer_projection_norm.weight", (width,), (None,)),
    }
    own = {
        "own_gate": leaf(f"{LAYER}per_layer_input_gate.weight", (width, hidden), (None, "model")),
        "own_out": leaf(f"{LAYER}per_layer_projection.weight", (hidden, width), ("model", None)),
        "own_out_norm": leaf(f"{LAYER}post_per_layer_input_norm.weight", (hidden,), ("model",)),
    }
    return top, own


def unused_keys(sources: Sequence[int]) -> list[str]:
    shared = [str(layer) for layer, source in enumerate(sources) if source != layer]
    if not shared:
        return []
    return [rf"model\.layers\.({'|'.join(shared)})\.self_attn\.(k_proj|v_proj|k_norm)\.weight"]
