"""Nemotron-H and Nemotron 3: layers of one block each, Mamba2, attention, an MLP or experts.
Source: arXiv 2504.03624.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxkv.models.config_reader import MAX_LAYERS, ConfigReader
from jaxkv.models.families.base import (
    FULL,
    Layout,
    Leaf,
    Names,
    mlp_biased,
    read_decoder,
    read_forms,
)
from jaxkv.models.families.delta import LINEAR
from jaxkv.models.families.experts import Experts, read_grouped
from jaxkv.models.families.hybrid import with_mixer, without_attention
from jaxkv.models.families.ssm import OLD_NAMES, mamba2_leaves, read_mamba2
from jaxkv.models.spec import ModelSpec

NAMES = Names(
    embed="backbone.embeddings",
    norm="backbone.norm_f",
    layer="backbone.layers.{layer}.",
    attn_norm="norm",
    mlp_norm="norm",
    q="mixer.q_proj",
    k="mixer.k_proj",
    v="mixer.v_proj",
    o="mixer.o_proj",
    gate=None,
    up="mixer.up_proj",
    down="mixer.down_proj",
)
PATTERN = {"M": LINEAR, "*": FULL, "-": "mlp", "E": "moe"}
FORMS = {form: form for form in PATTERN.values()} | OLD_NAMES
RENAMED = {
    "mamba_n_heads": "mamba_num_heads",
    "mamba_d_head": "mamba_head_dim",
    "mamba_n_groups": "n_groups",
    "mamba_d_state": "ssm_state_size",
    "mamba_d_conv": "conv_kernel",
}
OLDER = {
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_dt_min": "time_step_min",
    "mamba_conv_bias": "use_conv_bias",
}
"""Older names of keys, which count more than the newer ones, as in transformers."""

ATTENDING = ("attn_norm", "q", "k", "v", "o")


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    given = {new: config.get(old) for old, new in OLDER.items() if old in config.values}
    config = config.replaced(**given)
    forms = _forms(config)
    sized = config.replaced(num_hidden_layers=len(forms))
    return read_forms(forms, lambda form: _read_form(sized, form))


def _forms(config: ConfigReader) -> list[str]:
    """Reads what each layer is, from a list or from a text with a letter for each."""
    key = "hybrid_override_pattern"
    given = config.get("layers_block_type", config.get(key))
    if isinstance(given, str):
        if not 0 < len(given) <= MAX_LAYERS or not set(given) <= PATTERN.keys():
            raise config.fail(key, f"at most {MAX_LAYERS} letters out of {''.join(PATTERN)}")
        return [PATTERN[letter] for letter in given]
    if not isinstance(given, list) or not 0 < len(given) <= MAX_LAYERS:
        raise config.fail("layers_block_type", f"a list of at most {MAX_LAYERS} kinds of layers")
    return [FORMS[kind] for kind in config.kinds("layers_block_type", len(given), tuple(FORMS))]


def _read_form(config: ConfigReader, form: str) -> tuple[ModelSpec, Layout]:
    """Reads the model as if all of its layers were of one form."""
    num_layers = config.num_layers
    mixture: dict[str, Any] = {}
    if form == "moe":
        config.refuse("mlp_bias", False)
        experts, router = _read_experts(config)
        mixture = {"experts": lambda prefix, hidden: _ungated(experts, prefix, hidden)}
        mixture["router"] = router
    spec, layout = read = read_decoder(
        config,
        names=NAMES,
        biased=mlp_biased(config),
        ropes=[None] * num_layers,
        eps="layer_norm_epsilon",
        activation="mlp_hidden_act",
        **mixture,
    )
    (leaves,) = layout.layers
    if form == FULL:
        return spec, _only(layout, {name: leaves[name] for name in ATTENDING})
    if form == LINEAR:
        mixer = read_mamba2(
            config.renamed(**RENAMED),
            inner=config.size("mamba_num_heads") * config.size("mamba_head_dim"),
            norm_eps=spec.norm_eps,
            activation=config.choice("mamba_hidden_act", "silu", ("silu",)),
            least_step=config.number("time_step_min", 0.001),
        )
        has_biases = config.flag("use_bias", False)
        own = mamba2_leaves(
            mixer,
            f"{NAMES.layer}mixer.",
            spec.hidden_size,
            has_conv_bias=config.flag("use_conv_bias", True),
            has_in_bias=has_biases,
            has_out_bias=has_biases,
        )
        spec, _ = with_mixer(read, range(num_layers), mixer, own)
        return spec, _only(layout, {"attn_norm": leaves["attn_norm"], **own})
    rest = without_attention(leaves)
    del rest["attn_norm"]
    return replace(spec, groups=()), _only(layout, rest)


def _only(layout: Layout, leaves: Mapping[str, Leaf]) -> Layout:
    return replace(layout, layers=(leaves,))


def _read_experts(config: ConfigReader) -> tuple[Experts, Any]:
    experts, router = read_grouped(config)
    return replace(
        experts,
        router="mixer.gate",
        one="mixer.experts.{expert}.",
        bias="mixer.gate.e_score_correction_bias",
        shared="mixer.shared_experts.",
        shared_width=config.size("moe_shared_expert_intermediate_size"),
        latent=0 if config.get("moe_latent_size") is None else config.size("moe_latent_size"),
        latent_names=("mixer.fc1_latent_proj", "mixer.fc2_latent_proj"),
    ), router


def _ungated(experts: Experts, prefix: str, hidden: int) -> dict[str, Leaf]:
    """Describes experts that are MLPs without a gate."""
    leaves = experts.leaves(prefix, hidden)
    return {x: one for x, one in leaves.items() if x not in ("expert_gate", "shared_gate")}
