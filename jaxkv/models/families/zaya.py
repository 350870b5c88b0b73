"""ZAYA1: attention whose queries and keys see the last tokens, routers that see what those before
them saw, one expert of a token or none. Source: the model's card, Zyphra/ZAYA1-8B.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import (
    FULL,
    LAYER,
    SLIDING,
    Layout,
    Leaf,
    Names,
    Part,
    attn_biased,
    leaf,
    read_decoder,
)
from jaxkv.models.families.experts import MAX_EXPERTS, Experts, read_router
from jaxkv.models.families.hybrid import with_leaves
from jaxkv.models.recurrent import Convolved
from jaxkv.models.rope_config import read_rope
from jaxkv.models.spec import ModelSpec, RopeSpec, StateSpec

KINDS = {"hybrid": FULL, "hybrid_sliding": SLIDING}
THETAS = {"hybrid": 5e6, "hybrid_sliding": 1e4}
ATTENTION, ROUTER = f"{LAYER}self_attn.", f"{LAYER}mlp.gate."
NAMES = Names(
    q="self_attn.qkv_proj.q_proj", k="self_attn.qkv_proj.k_proj", v="self_attn.qkv_proj.v_proj"
)


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    num_layers = config.num_layers
    kinds = config.kinds("layer_types", num_layers, tuple(KINDS), ["hybrid"] * num_layers)
    ropes = {kind: _rope(config, kind) for kind in dict.fromkeys(kinds)}
    experts = Experts(
        count=config.size("num_experts", at_most=MAX_EXPERTS),
        width=config.size("moe_intermediate_size"),
        router="mlp.gate.router_mlp.out_proj",
        fused=("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
    )
    config.refuse("num_experts_per_tok", 1)
    spec, layout = read_decoder(
        config.replaced(intermediate_size=experts.width),
        names=NAMES,
        biased=(*attn_biased(config), *["head"] * config.flag("lm_head_bias", False)),
        kinds=[KINDS[kind] for kind in kinds],
        ropes=[ropes[kind] for kind in kinds],
        experts=experts.leaves,
        router=read_router(config, experts.count, used="num_experts_per_tok", num_empty=1),
    )
    (group, *_), hidden = spec.groups, spec.hidden_size
    if group.num_kv_heads * group.head_dim % 2:
        raise config.fail("num_key_value_heads", "an even number of values (half are of before)")
    keeper = Convolved(
        channels=(spec.num_heads + group.num_kv_heads) * spec.head_dim,
        values=group.num_kv_heads * spec.head_dim,
        widths=(config.size("cca_time0", 2, at_least=2), config.size("cca_time1", 2, at_least=2)),
    )
    (leaves,) = layout.layers
    size = config.size("router_hidden_size", 256)
    values = _values(keeper.values // 2, hidden, has_bias="v_bias" in leaves)
    leaves = {**leaves, **values, **_convolutions(spec, keeper), **_joins(hidden)}
    leaves |= _router(size, experts.count + 1, hidden)
    layout = replace(layout, layers=(leaves,)).with_top(
        embed_gain=leaf("model.input_hidden_states_scale", (hidden,), ("model",)),
        embed_shift=leaf("model.input_hidden_states_bias", (hidden,), ("model",)),
    )
    spec = replace(spec, states=(StateSpec(layers=tuple(range(num_layers)), mixer=keeper),))
    share = leaf(f"{ROUTER}router_states_scale", (size,), (None,))
    later = range(1, num_layers)
    return with_leaves((spec, layout), later, lambda own: {**own, "router_share": share})


def _values(size: int, hidden: int, *, has_bias: bool) -> dict[str, Leaf]:
    """Describes what makes values of a token, and of the one before: each device has all of it."""
    found = {}
    for name, source in (("v", "current"), ("v_late", "delayed")):
        source = f"{ATTENTION}qkv_proj.v_proj_{source}"
        found[name] = leaf(f"{source}.weight", (size, hidden), (None, "model"))
        if has_bias:
            found[f"{name}_bias"] = leaf(f"{source}.bias", (size,), (None,))
    return found


def _rope(config: ConfigReader, kind: str) -> RopeSpec:
    sections = config.section("rope_parameters")
    if kind not in sections.values:
        sections = ConfigReader({kind: {"partial_rotary_factor": 0.5}}, config.where)
    section = sections.section(kind).with_defaults({"rope_theta": THETAS[kind]})
    return read_rope(config.replaced(partial_rotary_factor=None), section, partly=True)


def _convolutions(spec: ModelSpec, keeper: Convolved) -> dict[str, Leaf]:
    """Describes the arrays of both convolutions, of queries and of keys, and factors of keys."""
    dim, kv_heads = spec.head_dim, spec.groups[0].num_kv_heads
    (first, second), channels = keeper.widths, keeper.channels
    found = {"k_gain": leaf(f"{ATTENTION}qk_norm.temp", (kv_heads,), ("kv_heads",))}

    def rows(axis: str, source: str, stored: tuple[int, ...], shape: tuple[int, ...]) -> Leaf:
        cut = spec.num_heads * dim
        start, stop = (0, cut) if axis == "heads" else (cut, channels)
        part = Part(shape=(channels, *stored), start=start, stop=stop)
        axes = (axis, *[None] * (len(shape) - 1))
        return leaf(f"{ATTENTION}qkv_proj.conv_qk_{source}", shape, axes, part=part)

    for name, axis, count in (("q", "heads", spec.num_heads), ("k", "kv_heads", kv_heads)):
        size, mixed = count * dim, (count, dim, dim * second)
        found |= {
            f"{name}_conv": rows(axis, "depthwise.weight", (1, first), (size * first,)),
            f"{name}_conv_bias": rows(axis, "depthwise.bias", (), (size,)),
            f"{name}_mix": rows(axis, "grouped.weight", (dim, second), mixed),
            f"{name}_mix_bias": rows(axis, "grouped.bias", (), (size,)),
        }
    return found


def _joins(hidden: int) -> dict[str, Leaf]:
    """Describes what moves and scales what a block gives, and the stream that it joins."""
    return {
        f"{block}_{of}_{kind}": leaf(
            f"{LAYER}{source}_residual_scale.{name}", (hidden,), ("model",)
        )
        for block, source in (("attn", "post_attention"), ("mlp", "post_mlp"))
        for of, kind, name in (
            ("out", "gain", "hidden_states_scale"),
            ("out", "shift", "hidden_states_bias"),
            ("stream", "gain", "residual_scale"),
            ("stream", "shift", "residual_bias"),
        )
    }


def _router(size: int, num_logits: int, hidden: int) -> Mapping[str, Leaf]:
    """Describes the arrays of a router, which every device has."""
    mlp = f"{ROUTER}router_mlp."

    def matrix(name: str, source: str, rows: int, columns: int) -> dict[str, Leaf]:
        found = {name: leaf(f"{source}.weight", (rows, columns), ("experts", "model"))}
        return found | {f"{name}_bias": leaf(f"{source}.bias", (rows,), (None,))}

    return {
        **matrix("router_view", f"{ROUTER}down_proj", size, hidden),
        "router_view_norm": leaf(f"{mlp}norm.weight", (size,), (None,)),
        **matrix("router_in", f"{mlp}fc1", size, size),
        **matrix("router_out", f"{mlp}fc2", size, size),
        "router": leaf(f"{mlp}out_proj.weight", (num_logits, size), ("experts", "model")),
        "router_bias": leaf(f"{ROUTER}balancing_biases", (num_logits,), ("experts",)),
    }
