"""The text part of Inkling: no rotation, but scores by distance; convolutions over the last tokens
of keys, values and what blocks give; experts whose weights add up to 1 with those of shared ones.
Source: the model's card, thinkingmachines/Inkling, as transformers has it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import (
    FULL,
    LAYER,
    QK_NORMED,
    SLIDING,
    Layout,
    Leaf,
    Part,
    leaf,
    read_decoder,
    read_forms,
)
from jaxkv.models.families.experts import MAX_EXPERTS, ROUTED, Experts, listed_dense, read_router
from jaxkv.models.recurrent import SHORT_CONV, ShortConvs
from jaxkv.models.spec import AttentionSpec, ModelSpec, QueryTemperature, Scales, StateSpec

KINDS = {"hybrid": FULL, "hybrid_sliding": SLIDING}
NEAR = {
    "num_attention_heads": "swa_num_attention_heads",
    "num_key_value_heads": "swa_num_key_value_heads",
    "head_dim": "swa_head_dim",
}
"""What layers with a window call their sizes."""

SPELLINGS = (
    (r"^model\.llm\.unembed\.", "lm_head."),
    (r"^model\.llm\.embed_norm\.", "model.embed_tokens.embed_norm."),
    (r"^model\.llm\.embed\.", "model.embed_tokens."),
    (r"^model\.llm\.", "model."),
    (r"\.attn\.w([qkvro])_[a-z]+\.", r".self_attn.\1_proj."),
    (r"\.attn\.", ".self_attn."),
    (r"_sconv\.weight$", "_sconv.conv1d.weight"),
    (r"\.attn_norm\.", ".input_layernorm."),
    (r"\.mlp_norm\.", ".post_attention_layernorm."),
    (r"\.mlp\.gate\.bias$", ".mlp.gate.e_score_correction_bias"),
    (r"\.w2_md\.", ".down_proj."),
    (r"\.(shared_)?w2_weight$", ".down_proj"),
    (r"\.(shared_)?w13_weight$", ".gate_up_proj"),
)
"""What published files call tensors."""


class Form(NamedTuple):
    """Says what a layer is."""

    kind: str
    is_routed: bool


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    config = _flat(config)
    num_layers = config.num_layers
    near = [layer for layer in range(num_layers) if (layer + 1) % 6]
    if config.get("local_layer_ids") is not None:
        near = config.whole_numbers("local_layer_ids")
    otherwise = ["hybrid_sliding" if layer in near else "hybrid" for layer in range(num_layers)]
    kinds = config.kinds("layer_types", num_layers, tuple(KINDS), otherwise)
    dense = listed_dense(config, range(config.size("dense_mlp_idx", 0, at_least=0)))
    forms = [Form(KINDS[kind], layer not in dense) for layer, kind in enumerate(kinds)]
    spec, layout = read_forms(forms, partial(_read_form, config))
    _, alone = read_forms(forms, partial(_read_form, config, is_alone=True))
    full = tuple(layer for layer, form in enumerate(forms) if form.kind == FULL)
    attention = replace(spec.attention, temperature=read_temperature(config, full))
    layout = replace(layout, also=alone.layers, spellings=SPELLINGS)
    return with_vocabulary(config, replace(spec, attention=attention), layout)


def _flat(config: ConfigReader) -> ConfigReader:
    """Returns the config with transformers' keys for those that only published files have."""
    given = {"sliding_window": config.size("sliding_window_size")}
    if config.get("dense_intermediate_size") is not None:  # the other one is that of experts
        given["moe_intermediate_size"] = config.size("intermediate_size")
        given["intermediate_size"] = config.size("dense_intermediate_size")
    return config.replaced(**given)


def with_vocabulary(
    config: ConfigReader, spec: ModelSpec, layout: Layout
) -> tuple[ModelSpec, Layout]:
    """Returns the model without rows of the embeddings and of the head that only fill them up."""
    stored, hidden = spec.vocab_size, spec.hidden_size
    norm = leaf("model.embed_tokens.embed_norm.weight", (hidden,), ("model",))
    used = config.size("unpadded_vocab_size", stored, at_most=stored)
    part = Part(shape=(stored, hidden), stop=used)
    cut = {
        name: leaf(layout.top[name].source, (used, hidden), ("vocab", "model"), part=part)
        for name in ("embed", "head")
    }
    layout = layout.with_top(embed_norm=norm, **(cut if used < stored else {}))
    return replace(spec, vocab_size=used), layout


def read_temperature(config: ConfigReader, layers: tuple[int, ...]) -> QueryTemperature | None:
    """Reads how queries of these layers grow with their position."""
    if config.get("log_scaling_n_floor") is None or not layers:
        return None
    return QueryTemperature(
        beta=config.number("log_scaling_alpha"),
        period=config.size("log_scaling_n_floor"),
        offset=1,
        is_smooth=True,
        layers=layers,
    )


def _read_form(
    config: ConfigReader, form: Form, *, is_alone: bool = False
) -> tuple[ModelSpec, Layout]:
    """Reads the model as if all its layers were of a form. is_alone: with the tensors that
    transformers writes of the text part alone.
    """
    if form.kind == SLIDING:
        config = config.replaced(**{key: config.size(near) for key, near in NEAR.items()})
    num_layers, head_dim = config.num_layers, config.head_dim
    count = config.size("n_routed_experts", at_most=MAX_EXPERTS)
    router = read_router(
        config,
        count,
        used="num_experts_per_tok",
        score="sigmoid",
        scale=config.number("route_scale"),
        num_sinks=config.size("n_shared_experts"),
    )
    spec, layout = read_decoder(
        config,
        names=QK_NORMED,
        kinds=[form.kind] * num_layers,
        ropes=[None] * num_layers,
        attention=AttentionSpec(has_distances=True),
        scales=Scales(logits=1 / config.number("logits_mup_width_multiplier")),
        experts=partial(_experts, config, router.num_sinks, is_alone) if form.is_routed else None,
        router=router if form.is_routed else None,
    )
    (group,), hidden, (own,) = spec.groups, spec.hidden_size, layout.layers
    keeper = ShortConvs(
        channels=group.num_kv_heads * head_dim,
        hidden=hidden,
        width=config.size("conv_kernel_size", at_least=2),
    )
    if not form.is_routed:
        width = config.size("intermediate_size")
        own = {**own, **({} if is_alone else _dense(width, hidden))}
    own = {**own, **_convolutions(keeper), **_distances(config, form, spec)}
    gain = leaf(f"{LAYER}mlp.{'gate.' if form.is_routed else ''}global_scale", (1,), (None,))
    spec = replace(
        spec,
        groups=(replace(group, num_heads=spec.num_heads, scale=1 / head_dim),),
        states=(StateSpec(layers=tuple(range(num_layers)), mixer=keeper),),
    )
    return spec, replace(layout, layers=({**own, "mlp_scalar": gain},))


def _distances(config: ConfigReader, form: Form, spec: ModelSpec) -> dict[str, Leaf]:
    """Describes what makes scores of distances: those in a window, or so many."""
    each = config.size("d_rel")
    extent = config.size("sliding_window" if form.kind == SLIDING else "rel_extent")
    shape, source = (spec.num_heads * each, spec.hidden_size), f"{LAYER}self_attn."
    profiles = f"{source}rel_logits_proj.proj"
    part = Part(shape=(each, extent))
    return {
        "distance": leaf(f"{source}r_proj.weight", shape, ("heads", "model")),
        "distance_profiles": leaf(profiles, (each * extent,), (None,), part=part),
    }


def _convolutions(keeper: ShortConvs) -> dict[str, Leaf]:
    def kernel(source: str, channels: int, axis: str) -> Leaf:
        part = Part(shape=(channels, 1, keeper.width))
        shape = (channels * keeper.width,)
        return leaf(f"{LAYER}{source}_sconv.conv1d.weight", shape, (axis,), part=part)

    return {
        f"k{SHORT_CONV}": kernel("self_attn.k", keeper.channels, "kv_heads"),
        f"v{SHORT_CONV}": kernel("self_attn.v", keeper.channels, "kv_heads"),
        f"attn{SHORT_CONV}": kernel("attn", keeper.hidden, "model"),
        f"mlp{SHORT_CONV}": kernel("mlp", keeper.hidden, "model"),
    }


def _dense(width: int, hidden: int) -> dict[str, Leaf]:
    """Describes gates and what they weigh of an MLP, whose rows published files have by turns."""
    source, shape, axes = f"{LAYER}mlp.w13_dn.weight", (width, hidden), ("ffn", "model")
    return {
        name: leaf(source, shape, axes, part=by_turns((2 * width, hidden), which))
        for which, name in enumerate(("gate", "up"))
    }


def by_turns(stored: tuple[int, ...], which: int) -> Part:
    """Says which rows of a tensor are those of gates (0), or of what they weigh (1)."""
    return Part(
        shape=stored,
        num_blocks=math.prod(stored[:-1]) // 2,
        start=which,
        stop=which + 1,
        of_all=len(stored) > 2,
    )


def _experts(
    config: ConfigReader, num_shared: int, is_alone: bool, prefix: str, hidden: int
) -> Mapping[str, Leaf]:
    """Describes the experts of a layer, and shared ones as one MLP of their width together."""
    count, width = config.size("n_routed_experts"), config.size("moe_intermediate_size")
    num_logits, shared = count + num_shared, f"{prefix}mlp.shared_experts."
    found = Experts(
        count=count,
        width=width,
        bias="mlp.gate.e_score_correction_bias",
        fused=("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
    ).leaves(prefix, hidden)
    found["router"] = leaf(found["router"].source, (num_logits, hidden), ("experts", "model"))
    for which, name in enumerate(("gate", "up")):
        shape, axes = (num_shared * width, hidden), ("ffn", "model")
        if is_alone:
            part = Part(shape=(num_shared, width, hidden), of_all=True)
            found[f"shared_{name}"] = leaf(f"{shared}{name}_proj", shape, axes, part=part)
            continue
        part = by_turns((num_shared, 2 * width, hidden), which)
        found[f"shared_{name}"] = leaf(f"{shared}gate_up_proj", shape, axes, part=part)
        part = by_turns((count, 2 * width, hidden), which)
        found[f"{ROUTED}{name}"] = replace(found[f"{ROUTED}{name}"], part=part)
    part = Part(
        shape=(num_shared, hidden, width), num_blocks=num_shared, of_all=True, side_by_side=True
    )
    shape = (hidden, num_shared * width)
    found["shared_down"] = leaf(f"{shared}down_proj", shape, ("model", "ffn"), part=part)
    return found
