"""Ling 3.0: Kimi delta attention whose decays have a least, gated latent attention in the last
layer of every group, and experts as DeepSeek V3 chooses them. Source: the model's card,
inclusionAI/Ling-3.0-flash.
"""

from __future__ import annotations

from dataclasses import replace

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import Layout, leaf
from jaxkv.models.families.delta import (
    CONV_ACTIVATIONS,
    matrices_of,
    read_kimi_delta,
    read_least,
    read_linear_layers,
    rest_of,
)
from jaxkv.models.families.experts import first_dense, listed_dense, read_grouped
from jaxkv.models.families.hybrid import with_leaves, with_mixer
from jaxkv.models.families.kimi_linear import PREFIX, RENAMED
from jaxkv.models.families.latent import read_latent
from jaxkv.models.recurrent import GatedDelta
from jaxkv.models.spec import GateLimits, ModelSpec, Scales

SPELLINGS = (
    (r"^model\.word_embeddings\.", "model.embed_tokens."),
    (r"\.attention\.", ".self_attn."),
    (r"\.self_attn\.dense\.", ".self_attn.o_proj."),
    (r"\.mlp\.gate\.expert_bias$", ".mlp.gate.e_score_correction_bias"),
)

HARMLESS = {
    "linear_attention": "kda",  # Ling 2.5 and 2.6 have this model_type too, and another recurrence
    "no_kda_lora": True,
    "num_kv_heads_for_linear_attn": 0,
    "linear_silu": True,
    "gated_attention_proj_granularity_type": "head_wise",
    "use_mla_nope": False,
    "use_qk_norm": True,
    "score_function": "sigmoid",
    **dict.fromkeys(("use_bias", "use_qkv_bias", "use_nGPT", "scale_router_input"), False),
    **dict.fromkeys(("up_proj_norm", "value_norm"), False),
}
"""Keys of published configs, with what they say in those that were read."""


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    config = config.renamed(**RENAMED)
    for key, harmless in HARMLESS.items():
        config.refuse(key, harmless)
    experts, router = read_grouped(config)
    found = read_latent(
        config,
        activations=CONV_ACTIVATIONS,
        experts=experts.leaves,
        router=router,
        is_dense=listed_dense(config, first_dense(config)),
        scales=Scales(limits=_limits(config)),
    )
    hidden = found[0].hidden_size
    linear = read_linear_layers(config, every=config.size("layer_group_size", 6))
    gate = leaf(f"{PREFIX}g_proj.weight", (found[0].num_heads, hidden), ("heads", "model"))
    attends = [layer for layer in range(found[0].num_layers) if layer not in linear]
    found = with_leaves(found, attends, lambda own: {**own, "attn_gate": gate})
    mixer = _read_mixer(config)
    leaves = rest_of(mixer, PREFIX, hidden, conv="{name}_conv1d", norm="o_norm", out="o_proj")
    for name, source in zip(("q", "k", "v", "b", "gate", "step"), "qkvbgf", strict=True):
        leaves |= matrices_of(mixer, f"{PREFIX}{source}_proj", (f"delta_{name}",), hidden)
    spec, layout = with_mixer(found, linear, mixer, leaves)
    return spec, replace(layout, spellings=SPELLINGS)


def _limits(config: ConfigReader) -> GateLimits:
    """Reads limits for each layer, as vLLM does; transformers 5.24 reads none."""
    found = []
    for key in ("expert_swiglu_limit_list", "share_expert_swiglu_limit_list"):
        num_layers, given = config.num_layers, config.get(key)
        limits = [0 if one is None else one for one in given] if isinstance(given, list) else given
        if given is not None and not (
            isinstance(limits, list)
            and len(limits) >= num_layers
            and all(type(one) in (int, float) and 0 <= one < 1e30 for one in limits)
        ):
            raise config.fail(key, f"a number for each of the {num_layers} layers, 0 for none")
        found.append(tuple(map(float, (limits or [])[:num_layers])))
    return GateLimits(routed=found[0], shared=found[1], of_act=True)


def _read_mixer(config: ConfigReader) -> GatedDelta:
    # In transformers' files head_dim is how much is rotated, and these are beside it.
    kernel = config.get("short_conv_kernel_size", 4)
    own = config.replaced(
        linear_num_heads=config.size("linear_num_heads", config.size("num_attention_heads")),
        linear_head_dim=config.size("linear_head_dim", config.size("head_dim", 128)),
        linear_conv_kernel_dim=config.get("linear_conv_kernel_dim", kernel),
    )
    has_least = config.flag("kda_safe_gate", True)
    least = read_least(config, "kda_lower_bound", -5.0) if has_least else 0.0
    return replace(read_kimi_delta(own), least_decay=least)
