"""Muse Spark: Muse Glimmer with experts of a size of their own, and with gates of what joins the
stream. Source: the model's card, meta-models/Muse-Spark-Open-816B-A42B.
"""

from __future__ import annotations

from dataclasses import replace

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import LAYER, SANDWICH, Layout, Leaf, leaf
from jaxkv.models.families.experts import MAX_EXPERTS, Experts, listed_dense, read_router
from jaxkv.models.families.muse_glimmer_text import read_muse
from jaxkv.models.spec import ModelSpec, OwnNorm


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    eps = config.number("post_norm_eps", 1e-8)
    weighing = OwnNorm(eps=eps, weighs_first=True)
    norms = {
        "post_attn_norm": OwnNorm(eps=eps),
        "post_mlp_norm": weighing,
        "routed_out_norm": weighing,
    }
    count = config.size("num_local_experts", at_most=MAX_EXPERTS)
    width = config.size("moe_hidden_size")
    experts = Experts(
        count=count,
        width=config.size("moe_intermediate_size"),
        bias="mlp.gate.e_score_correction_bias",
        fused=("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
        latent=width,
        latent_names=("mlp.pre_expert_proj", "mlp.post_expert_proj"),
    )

    def leaves(prefix: str, hidden: int) -> dict[str, Leaf]:
        found = experts.leaves(prefix, hidden)
        for name, source in (
            ("latent_norm", "pre_expert_norm"),
            ("routed_out_norm", "experts.post_expert_norm"),
        ):
            found[name] = leaf(f"{prefix}mlp.{source}.weight", (width,), (None,))
        return found

    spec, layout = read_muse(
        config,
        replace(SANDWICH, post_attn_norm=None),
        norms,
        ("attn_out_norm", "post_attn_norm"),
        join_temperature=config.number("residual_gate_temperature"),
        experts=leaves,
        is_dense=listed_dense(config),
        router=read_router(
            config,
            count,
            used="num_experts_per_tok",
            score="sigmoid",
            is_normalised=True,
            scale=config.number("routed_scaling_factor", 1.0),
            logit_scale=config.number("output_multiplier"),
        ),
    )
    gates = {
        name: leaf(f"{LAYER}{source}.gate", (spec.hidden_size,), ("model",))
        for name, source in (
            ("attn_join", "post_attention_residual_gate"),
            ("mlp_join", "post_feedforward_residual_gate"),
        )
    }
    return spec, layout.in_each_layer(**gates)
