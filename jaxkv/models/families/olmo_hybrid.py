"""OLMo Hybrid: Gated DeltaNet in three of four layers, attention as in OLMo 3, mostly without
rotation, in the others. Source: the model's card, allenai/Olmo-Hybrid-7B.
"""

from __future__ import annotations

from dataclasses import replace

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import (
    LAYER,
    LLAMA,
    POST_NORMED,
    Layout,
    Leaf,
    attn_biased,
    read_decoder,
    read_forms,
)
from jaxkv.models.families.delta import (
    CONV_ACTIVATIONS,
    matrices_of,
    read_gated_delta,
    read_linear_layers,
    rest_of,
)
from jaxkv.models.families.hybrid import with_mixer
from jaxkv.models.recurrent import GatedDelta
from jaxkv.models.spec import AttentionSpec, ModelSpec

PREFIX = f"{LAYER}linear_attn."
CONVOLUTIONS = tuple(f"{PREFIX}{name}_conv1d.weight" for name in "qkv")
SPELLINGS = (
    (r"\.attention_layer_norm\.", ".input_layernorm."),
    (r"\.feedforward_layer_norm\.", ".post_attention_layernorm."),
)


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    layers, mixer = read_linear_layers(config, every=4), _read_mixer(config)
    # Published models have a theta that is null, which asks for no rotation.
    theta = config.section("rope_parameters").values.get("rope_theta", config.get("rope_theta"))

    def read_form(is_linear: bool) -> tuple[ModelSpec, Layout]:
        found = read_decoder(
            config,
            names=LLAMA if is_linear else POST_NORMED,
            biased=attn_biased(config),
            ropes=None if theta is not None else [None] * config.num_layers,
            attention=AttentionSpec(qk_norm="whole"),
            activations=CONV_ACTIVATIONS,
        )
        if not is_linear:
            return found
        spec, _ = found
        leaves = _leaves(mixer, spec.hidden_size)
        return with_mixer(found, range(spec.num_layers), mixer, leaves)

    forms = [layer in layers for layer in range(config.num_layers)]
    spec, layout = read_forms(forms, read_form)
    return spec, replace(layout, spellings=SPELLINGS, joined=(CONVOLUTIONS,))


def _read_mixer(config: ConfigReader) -> GatedDelta:
    num_heads = config.size("num_attention_heads")
    key_heads = config.size("linear_num_key_heads", num_heads)
    key_dim = max(1, int(0.75 * config.size("hidden_size") / key_heads))
    key_dim = config.size("linear_key_head_dim", key_dim)
    config = config.replaced(
        linear_num_key_heads=key_heads,
        linear_num_value_heads=config.size("linear_num_value_heads", num_heads),
        linear_key_head_dim=key_dim,
        linear_value_head_dim=config.size("linear_value_head_dim", 2 * key_dim),
    )
    mixer = read_gated_delta(config, norm_eps=1e-5)
    signed = config.flag("linear_allow_neg_eigval", True)
    return replace(mixer, most_beta=2.0) if signed else mixer


def _leaves(mixer: GatedDelta, hidden: int) -> dict[str, Leaf]:
    sources = {"q": "q", "k": "k", "v": "v", "gate": "g", "b": "b", "step": "a"}
    found = rest_of(mixer, PREFIX, hidden, conv="{name}_conv1d", norm="o_norm", out="o_proj")
    for name, source in sources.items():
        found |= matrices_of(mixer, f"{PREFIX}{source}_proj", (f"delta_{name}",), hidden)
    return found
