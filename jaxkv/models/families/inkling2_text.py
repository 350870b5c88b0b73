"""The text part of Inkling 2: Inkling whose blocks choose among what layers before them gave, and
whose tokens decide on convolutions and sinks. Source: the model's card,
thinkingmachines/Inkling-2-Small-MXFP8, as transformers has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.depth import ATTN_QUERY, MLP_QUERY, QUERY
from jaxkv.models.families.base import (
    FULL,
    LAYER,
    SLIDING,
    Layout,
    Leaf,
    Names,
    Part,
    leaf,
    read_decoder,
    read_forms,
)
from jaxkv.models.families.experts import MAX_EXPERTS, ROUTED, Experts, read_router
from jaxkv.models.families.inkling_text import (
    KINDS,
    NEAR,
    by_turns,
    read_temperature,
    with_vocabulary,
)
from jaxkv.models.recurrent import SAID, SHORT_CONV, SOURCE, ShortConvs
from jaxkv.models.spec import (
    AttentionSpec,
    DepthSpec,
    GateLimits,
    KVGroup,
    ModelSpec,
    OwnNorm,
    Scales,
    StateSpec,
)

OWN = f"{LAYER}self_attn."
BIAS = f"{OWN}relative_position_bias."
NAMES = Names(
    q="self_attn.q_proj.linear",
    k="self_attn.k_proj.linear",
    v="self_attn.v_proj.linear",
    o="self_attn.o_proj.linear",
)
SPELLINGS = (
    (r"^model\.llm\.unembed\.", "lm_head."),
    (r"^model\.llm\.embed_norm\.", "model.embed_tokens.embed_norm."),
    (r"^model\.llm\.embed\.", "model.embed_tokens."),
    (r"^model\.llm\.attn_res\.mlp_queries\.(\d+)$", r"model.layers.\1.mlp_input.query"),
    (r"^model\.llm\.attn_res\.output_query$", "model.final_input.query"),
    (r"^model\.llm\.", "model."),
    (r"\.attn\.w([qkvo])_[a-z]+\.", r".self_attn.\1_proj.linear."),
    (r"\.attn\.wr_du\.", ".self_attn.relative_position_bias.linear."),
    (r"\.attn\.rel_logits_proj\.", ".self_attn.relative_position_bias."),
    (r"\.attn\.rel_l2_clip\.", ".self_attn.relative_position_bias.norm."),
    (r"\.attn\.q_l2_clip\.", ".self_attn.q_proj.norm."),
    (r"\.attn\.gate_attn\.", ".self_attn.o_proj.gate_proj."),
    (r"\.attn\.attn_sink_proj\.", ".self_attn.sink_proj."),
    (r"\.attn\.([kv])_sconv\.", r".self_attn.\1_proj.sconv."),
    (r"\.attn_sconv\.", ".post_attention_convolution."),
    (r"\.mlp_sconv\.", ".post_mlp_convolution."),
    (r"(convolution|sconv)\.weight$", r"\1.conv1d.weight"),
    (r"\.static_w$", ".static_weight"),
    (r"\.weight_proj$", ".weight_proj.weight"),
    (r"\.([qkv])_input_norm\.", r".\1_input_layernorm."),
    (r"\.attn_norm\.", ".input_layernorm."),
    (r"\.mlp_norm\.", ".post_attention_layernorm."),
    (r"\.mlp\.gate\.bias$", ".mlp.gate.e_score_correction_bias"),
    (r"\.w13_weight$", ".gate_up_proj"),
    (r"\.w2_weight$", ".down_proj"),
)
"""Names of tensors in published files, and those under which transformers saves them."""


class Form(NamedTuple):
    """Says what a layer is."""

    kind: str
    is_first: bool
    has_messages: bool


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    return read_over(config, DepthSpec(size=config.size("n_layers_per_attn_res_block")))


def read_over(config: ConfigReader, asked: DepthSpec) -> tuple[ModelSpec, Layout]:
    """Reads a model whose blocks choose so among what layers gave."""
    num_layers = config.num_layers
    otherwise = ["hybrid_sliding" if (i + 1) % 6 else "hybrid" for i in range(num_layers)]
    kinds = config.kinds("layer_types", num_layers, tuple(KINDS), otherwise)
    num_runs = num_layers + len(asked.again) * (asked.num_times - 1)
    order = asked.order(num_runs)
    forms = [Form(KINDS[kinds[i]], i == 0, i in asked.again) for i in order]
    config = config.replaced(num_hidden_layers=num_runs)
    spec, layout = read_forms(forms, partial(_read_form, config))
    spec = replace(spec, scales=replace(spec.scales, depth=asked))
    full = tuple(layer for layer, form in enumerate(forms) if form.kind == FULL)
    attention = replace(spec.attention, temperature=read_temperature(config, full))
    numbers = order if asked.num_times > 1 else ()
    layout = replace(layout, spellings=(*_queries(num_layers), *SPELLINGS), numbers=numbers)
    spec, layout = with_vocabulary(config, replace(spec, attention=attention), layout)
    query = leaf("model.final_input.query", (spec.hidden_size,), ("model",))
    return spec, layout.with_top(**{QUERY: query})


def _queries(num_layers: int) -> tuple[tuple[str, str], ...]:
    """Returns what published files call queries of layers, whose first one has none."""
    return tuple(
        (
            rf"^model\.llm\.attn_res\.attn_queries\.{i - 1}$",
            f"model.layers.{i}.attention_input.query",
        )
        for i in range(1, num_layers)
    )


def _read_form(config: ConfigReader, form: Form) -> tuple[ModelSpec, Layout]:
    """Reads the model as if all its layers were of a form."""
    if form.kind == SLIDING:
        config = config.replaced(**{key: config.size(near) for key, near in NEAR.items()})
    num_layers, head_dim = config.num_layers, config.head_dim
    count = config.size("n_routed_experts", at_most=MAX_EXPERTS)
    longest, limits = config.number("qk_l2_clip_threshold"), ("mlp_gate_softcap", "mlp_up_softcap")
    router = read_router(
        config,
        count,
        used="num_experts_per_tok",
        score=config.choice("scoring_func", "sigmoid", ("sqrtsoftplus", "sigmoid")),
        is_normalised=True,
        scale=config.number("route_scale"),
    )
    spec, layout = read_decoder(
        config.replaced(
            sliding_window=config.size("sliding_window_size"),
            intermediate_size=config.size("moe_intermediate_size"),
            hidden_act="silu",  # whatever the config says
        ),
        names=NAMES if form.kind == SLIDING else replace(NAMES, attn_norm="q_input_layernorm"),
        kinds=[form.kind] * num_layers,
        ropes=[None] * num_layers,
        unit_norms=("k_norm", "v_norm"),
        attention=AttentionSpec(has_distances=True, has_sinks=True, qk_norm="heads"),
        scales=Scales(
            logit_cap=config.number("final_logit_softcapping"),
            limits=GateLimits(soft=(config.number(limits[0]), config.number(limits[1]))),
            norms=(
                ("q_norm", OwnNorm(longest=longest)),
                ("k_norm", OwnNorm(longest=longest)),
                ("distance_norm", OwnNorm(longest=config.number("rel_l2_clip_threshold"))),
            ),
        ),
        experts=partial(_experts, config),
        router=router,
    )
    (group,), hidden, (own,) = spec.groups, spec.hidden_size, layout.layers
    group = replace(group, num_heads=spec.num_heads, scale=head_dim**-0.5)
    keeper = ShortConvs(
        channels=group.num_kv_heads * head_dim,
        hidden=hidden,
        width=config.size("conv_kernel_size", at_least=2),
        by_root=True,
    )
    own = {
        **own,
        **_attention(config, form, group, hidden),
        **_convolutions(form, keeper, group),
        **_depth(form, hidden),
    }
    states = (StateSpec(layers=tuple(range(num_layers)), mixer=keeper),)
    return replace(spec, groups=(group,), states=states), replace(layout, layers=(own,))


def _depth(form: Form, hidden: int) -> dict[str, Leaf]:
    """Describes what chooses what comes into blocks, and norms of it."""
    found = {MLP_QUERY: leaf(f"{LAYER}mlp_input.query", (hidden,), ("model",))}
    names = ("k", "v") if form.kind == FULL else ()
    for name in names:
        source = f"{LAYER}{name}_input_layernorm.weight"
        found[f"{name}{SOURCE}_norm"] = leaf(source, (hidden,), ("model",))
    if form.is_first:
        return found
    source, count = f"{LAYER}attention_input.query", 1 + len(names)
    part = Part(shape=(count, hidden)) if names else None
    return {**found, ATTN_QUERY: leaf(source, (count * hidden,), (None,), part=part)}


def _attention(config: ConfigReader, form: Form, group: KVGroup, hidden: int) -> dict[str, Leaf]:
    """Describes what bounds queries, gates what attention gives, and makes scores of distances,
    those in a window or so many, and of nothing.
    """
    each, count, dim = config.size("d_rel"), group.num_heads or 0, group.head_dim
    extent = config.size("sliding_window_size" if form.kind == SLIDING else "rel_extent")

    def matrix(source: str, rows: int) -> Leaf:
        return leaf(f"{source}.weight", (rows, hidden), ("heads", "model"))

    def vector(source: str, rows: int, columns: int, axis: str | None) -> Leaf:
        return leaf(source, (rows * columns,), (axis,), part=Part(shape=(rows, columns)))

    return {
        "q_norm": vector(f"{OWN}q_proj.norm.scale", count, dim, "heads"),
        "attn_gate": matrix(f"{OWN}o_proj.gate_proj", count * dim),
        "token_sinks": matrix(f"{OWN}sink_proj", count),
        "distance": matrix(f"{BIAS}linear", count * each),
        "distance_norm": vector(f"{BIAS}norm.scale", count, each, "heads"),
        "distance_profiles": vector(f"{BIAS}proj", each, extent, None),
    }


def _convolutions(form: Form, keeper: ShortConvs, group: KVGroup) -> dict[str, Leaf]:
    def kernel(source: str, channels: int, axis: str) -> Leaf:
        part, shape = Part(shape=(channels, 1, keeper.width)), (channels * keeper.width,)
        return leaf(f"{LAYER}{source}.conv1d.weight", shape, (axis,), part=part)

    found = {
        f"attn{SHORT_CONV}": kernel("post_attention_convolution", keeper.hidden, "model"),
        f"mlp{SHORT_CONV}": kernel("post_mlp_convolution", keeper.hidden, "model"),
    }
    for name in ("k", "v"):
        source = f"self_attn.{name}_proj.sconv"
        if form.kind == SLIDING:
            found[f"{name}{SHORT_CONV}"] = kernel(source, keeper.channels, "kv_heads")
            continue
        part = Part(shape=(keeper.width, keeper.channels), transposed=True)
        size = (keeper.channels * keeper.width,)
        static = leaf(f"{LAYER}{source}.static_weight", size, ("kv_heads",), part=part)
        shape = (group.num_kv_heads * keeper.width, keeper.hidden)
        said = leaf(f"{LAYER}{source}.weight_proj.weight", shape, ("kv_heads", "model"))
        found |= {f"{name}{SHORT_CONV}": static, f"{name}{SAID}": said}
    return found


def _experts(config: ConfigReader, prefix: str, hidden: int) -> Mapping[str, Leaf]:
    """Describes the experts of a layer, whose rows of gates and of what they weigh take turns."""
    count, width = config.size("n_routed_experts"), config.size("moe_intermediate_size")
    found = Experts(
        count=count,
        width=width,
        bias="mlp.gate.e_score_correction_bias",
        fused=("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
    ).leaves(prefix, hidden)
    for which, name in enumerate(("gate", "up")):
        part = by_turns((count, 2 * width, hidden), which)
        found[f"{ROUTED}{name}"] = replace(found[f"{ROUTED}{name}"], part=part)
    return found
