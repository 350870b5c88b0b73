"""The text part of Dots 3 Note: latent attention in all layers, of other sizes in those with a
window than in those that choose keys as DeepSeek-V3.2's do, behind a gate for each head, and
experts as DeepSeek V3 chooses them. Source: transformers' Dots3Note.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.axk1 import read_dense
from jaxkv.models.families.base import FULL, LAYER, SLIDING, Layout, leaf, read_forms
from jaxkv.models.families.experts import listed_dense, read_grouped
from jaxkv.models.families.latent import MAX_HEAD, read_index, read_latent
from jaxkv.models.rope_config import rope_section
from jaxkv.models.spec import IndexSpec, ModelSpec

ALWAYS = {
    "apply_mla_qkv_lora_rescale": True,
    "attention_gate_type": "headwise",
    "swa_attention_gate_type": "headwise",
    "k_rope_only_layernorm": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "use_dynamic_rsf": False,
}
"""Published files say this of what these models have, or have not. transformers does not ask."""

INDEXED = "indexed_attention"
NEAR = {
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 1024,
    "kv_lora_rank": 1024,
    "head_dim": 256,
    "qk_nope_head_dim": 192,
    "v_head_dim": 128,
}
"""Sizes of layers with a window, where a file does not say them behind `swa_` or layer by layer."""

SIZES = (*NEAR, "qk_rope_head_dim")
LISTED = "per_layer_config"
"""Has the sizes of single layers where transformers has written the file."""


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    for key, value in ALWAYS.items():
        config.refuse(key, value)
    kinds, dense = _kinds(config), _dense(config)
    sized = {kind: config.replaced(**own) for kind, own in _sizes(config, kinds).items()}
    forms = [(kind, layer not in dense) for layer, kind in enumerate(kinds)]
    spec, layout = read_forms(forms, lambda form: _read_form(sized[form[0]], *form))
    index = _read_index(sized[INDEXED]) if INDEXED in sized else None
    attention = replace(spec.attention, index=index, latent_eps=spec.norm_eps, scales_latents=True)
    # A layer behind the last predicts later tokens, of which configs need say nothing.
    layout = layout.with_unread(rf"model\.layers\.{spec.num_layers}\..*")
    return replace(spec, attention=attention), layout


def _read_form(config: ConfigReader, kind: str, is_routed: bool) -> tuple[ModelSpec, Layout]:
    """Reads the model as if all its layers were of a kind, whose sizes the config has, and had
    experts, or none.
    """
    experts, router = read_grouped(config)
    width = config.size("shared_experts_intermediate_size")
    width = config.size("moe_shared_expert_intermediate_size", width)
    experts = replace(experts, shared_width=config.size("n_shared_experts") * width)
    window = config.size("sliding_window", config.size("sliding_window_size", 512))
    spec, layout = read_latent(
        config.replaced(
            sliding_window=window, rope_parameters=_rope(config, kind), rope_scaling=None
        ),
        kinds=[SLIDING if kind == SLIDING else FULL] * config.num_layers,
        experts=experts.leaves if is_routed else None,
        router=router if is_routed else None,
        index=_read_index(config) if kind == INDEXED else None,
    )
    # Scaled rotary embeddings change scores by cos and sin alone.
    group = replace(spec.groups[0], num_heads=spec.num_heads, scale=spec.head_dim**-0.5)
    source, size = f"{LAYER}self_attn.", config.size("qk_rope_head_dim")
    gate = leaf(f"{source}g_proj.weight", (spec.num_heads, spec.hidden_size), ("heads", "model"))
    norm = leaf(f"{source}k_rope_only_layernorm.weight", (size,), (None,))
    layout = layout.in_each_layer(attn_gate=gate, rotated_norm=norm)
    return replace(spec, groups=(group,)), layout


def _read_index(config: ConfigReader) -> IndexSpec:
    return read_index(config, interleaved=True)


def _kinds(config: ConfigReader) -> list[str]:
    """Lists what each layer is. In published files layers without a window are "full_attention",
    and `use_dsa` says of all of them whether they choose keys.
    """
    has_near = config.flag("use_sliding_window", True)
    otherwise = [
        SLIDING if has_near and layer >= 2 and layer % 4 != 1 else INDEXED
        for layer in range(config.num_layers)
    ]
    kinds = config.kinds("layer_types", config.num_layers, (FULL, INDEXED, SLIDING), otherwise)
    if config.get("use_dsa") is None and {"use_dsa", LISTED} & config.values.keys():
        return kinds
    far = INDEXED if config.flag("use_dsa", True) else FULL
    return [kind if kind == SLIDING else far for kind in kinds]


def _sizes(config: ConfigReader, kinds: list[str]) -> dict[str, dict[str, int]]:
    """Reads the sizes of layers of each kind."""
    found: dict[str, dict[str, int]] = {}
    otherwise = {"num_key_value_heads": config.size("num_attention_heads")}
    plain = {name: config.size(name, otherwise.get(name)) for name in SIZES}
    near = plain if LISTED in config.values else _near(config)
    for kind, own in zip(kinds, config.by_layer(LISTED, SIZES), strict=True):
        given = near if kind == SLIDING else plain
        sizes = {name: own.size(name, size) for name, size in given.items()}
        if found.setdefault(kind, sizes) != sizes:
            raise config.fail(LISTED, f"equal sizes in all layers of {kind}")
    return found


def _near(config: ConfigReader) -> dict[str, int]:
    """Reads the sizes of layers with a window as published files say them."""
    sizes = {
        name: config.size(f"swa_{name}", size, at_most=MAX_HEAD) for name, size in NEAR.items()
    }
    rest = sizes["head_dim"] - sizes["qk_nope_head_dim"]
    return {**sizes, "qk_rope_head_dim": config.size("swa_qk_rope_head_dim", rest)}


def _dense(config: ConfigReader) -> Collection[int]:
    """Lists the layers without experts; `moe_layer_freq` may say it of each."""
    if not isinstance(config.get("moe_layer_freq"), list):
        return read_dense(config)
    listed = config.whole_numbers("moe_layer_freq")
    first = config.size("first_k_dense_replace", 1, at_least=0)
    if len(listed) < config.num_layers:
        raise config.fail("moe_layer_freq", f"a number for each of {config.num_layers} layers")
    dense = [i for i in range(config.num_layers) if i < first or not listed[i]]
    return listed_dense(config, dense)


def _rope(config: ConfigReader, kind: str) -> Mapping[str, Any]:
    """Returns what the file says of the rotary embedding of layers of a kind: under its name, or of
    all layers alike.
    """
    given, theta = rope_section(config), config.number("rope_theta", 8e7)
    if not given.values:
        near = config.number("swa_rope_theta", 5e4)
        return {"rope_theta": near if kind == SLIDING else theta}
    if {FULL, INDEXED, SLIDING} & given.values.keys():
        if kind not in given.values:
            raise config.fail("rope_parameters", f"a section of {kind} too")
        given = given.section(kind)
    return {"rope_theta": theta, **given.values}
