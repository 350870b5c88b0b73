"""LongCat-Flash: two layers of latent attention and an MLP are one in its checkpoints, whose
experts run beside the second: what they make of the input to the first one's MLP joins the stream
behind the second. Some experts give back what comes in. Source: arXiv 2509.01322.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from jaxkv.models.config_reader import MAX_LAYERS, ConfigReader
from jaxkv.models.families.base import LAYER, Layout, Leaf, leaf
from jaxkv.models.families.experts import MAX_EXPERTS, Experts, read_router
from jaxkv.models.families.latent import read_latent
from jaxkv.models.spec import ModelSpec

PREFIX = "model.layers.{pair}."
OWN = ("self_attn", "input_layernorm", "post_attention_layernorm", "mlp")
"""Names the modules that a layer has for each half, in a list."""


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    num_layers = config.size("num_layers", at_most=MAX_LAYERS // 2)
    hidden = config.size("hidden_size")
    for key in ("mla_scale_q_lora", "mla_scale_kv_lora"):
        config.refuse(key, True)
    spec, layout = read_latent(
        config.replaced(
            num_hidden_layers=2 * num_layers, intermediate_size=config.size("ffn_hidden_size")
        ),
    )
    config.size("q_lora_rank")  # what queries are made of is scaled
    experts, num_identity = _read_experts(config)
    count = experts.count + num_identity
    router = read_router(
        config,
        count,
        used="moe_topk",
        scale=config.number("routed_scaling_factor", 1.0),
        num_identity=num_identity,
        is_shortcut=True,
    )
    half = {name: _of_half(one) for name, one in layout.layers[0].items()}
    routed = experts.leaves(PREFIX, hidden)
    for name, rest, axes in (("router", (hidden,), ("model",)), ("router_bias", (), ())):
        routed[name] = leaf(routed[name].source, (count, *rest), ("experts", *axes))
    # Some checkpoints have part of the experts that are none.
    unread = "|".join(str(i) for i in range(experts.count, count))
    unread = rf"model\.layers\.\d+\.mlp\.experts\.({unread})\..*"
    spec = replace(
        spec,
        attention=replace(spec.attention, scales_latents=True),
        router=router,
        layer_kinds=(0, 1) * num_layers,
    )
    layers: tuple[Mapping[str, Leaf], ...] = ({**half, **routed}, half)
    return spec, replace(layout, layers=layers).with_unread(unread)


def _of_half(one: Leaf) -> Leaf:
    """Returns an array of a layer as it is called in a list of two."""
    own = one.source.removeprefix(LAYER)
    name, rest = own.split(".", 1)
    if name not in OWN:
        raise ValueError(f"expected an array of {', '.join(OWN)}, got {own}")
    name = "mlps" if name == "mlp" else name
    return replace(one, source=f"{PREFIX}{name}.{{half}}.{rest}")


def _read_experts(config: ConfigReader) -> tuple[Experts, int]:
    """Reads the experts, and how many there are beside them that give back what comes in."""
    config.refuse("router_bias", False)
    config.refuse("zero_expert_type", "identity")
    num_identity = config.size("zero_expert_num", 0, at_least=0, at_most=MAX_EXPERTS)
    experts = Experts(
        count=config.size("n_routed_experts", at_most=MAX_EXPERTS),
        width=config.size("expert_ffn_hidden_size"),
        router="mlp.router.classifier",
        bias="mlp.router.e_score_correction_bias",
    )
    return experts, num_identity
