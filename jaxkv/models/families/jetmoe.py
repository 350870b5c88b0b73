"""JetMoE: experts in place of MLPs, and of the matrices of queries and outputs. Source: arXiv
2404.07413.
"""

from __future__ import annotations

from dataclasses import replace

from jaxkv.models.attention_experts import OUTPUT, QUERIES, ROUTER
from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import LAYER, Layout, Leaf, Part, leaf, read_decoder
from jaxkv.models.families.experts import MAX_EXPERTS, Experts, read_router
from jaxkv.models.families.hybrid import rows_of
from jaxkv.models.spec import ModelSpec, OwnNorm, Scales

ATTENTION = f"{LAYER}self_attention."
EPS = 1e-6
"""Of the norms in layers, whatever a config says of the last one."""


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    kv_heads, count = (
        config.size("num_key_value_heads"),
        config.size("num_local_experts", at_most=MAX_EXPERTS),
    )
    router = read_router(config, count, used="num_experts_per_tok", of_chosen=True)
    experts = Experts(
        count=count,
        width=config.size("intermediate_size"),
        router="mlp.router.layer",
        fused=("mlp.input_linear.weight", "mlp.output_linear.weight"),
    )
    spec, layout = read_decoder(
        config.replaced(
            num_attention_heads=kv_heads * router.num_used,
            head_dim=config.size("kv_channels"),
            rms_norm_eps=EPS,
        ),
        activation="activation_function",
        experts=experts.leaves,
        router=router,
        scales=Scales(norms=(("norm", OwnNorm(eps=config.number("rms_norm_eps", EPS))),)),
    )
    own = {name: one for name, one in layout.layers[0].items() if name not in ("q", "k", "v", "o")}
    own |= _attention_leaves(spec.hidden_size, kv_heads * spec.head_dim, count)
    own["routed_bias"] = leaf(f"{LAYER}mlp.bias", (spec.hidden_size,), ("model",))
    return spec, replace(layout, layers=(own,))


def _attention_leaves(hidden: int, width: int, count: int) -> dict[str, Leaf]:
    """Describes a layer's attention. width: numbers of a token's keys, as of experts' queries."""
    prefix = f"{ATTENTION}experts."
    found = rows_of(
        f"{ATTENTION}kv_proj.weight",
        {"k": width, "v": width},
        hidden,
        {"k": "kv_heads", "v": "kv_heads"},
    )
    shapes = {
        QUERIES: ("input_linear", (width, hidden), ("heads", "model")),
        OUTPUT: ("output_linear", (hidden, width), ("model", "heads")),
    }
    for name, (source, shape, axes) in shapes.items():
        part = Part(shape=(count, *shape), num_blocks=count, of_all=True)
        found[name] = leaf(f"{prefix}{source}.weight", shape, axes, part=part, num_experts=count)
    axes = ("experts", "model")
    found[ROUTER] = leaf(f"{prefix}router.layer.weight", (count, hidden), axes)
    found["o_bias"] = leaf(f"{prefix}bias", (hidden,), ("model",))
    return found
