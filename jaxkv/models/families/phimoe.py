"""Phi-3.5-MoE: LayerNorms, and experts that are chosen one after the other. Sources: arXiv
2404.14219, 2409.12136 (the router).
"""

from __future__ import annotations

from dataclasses import replace

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import Layout, attn_biased, mistral_kinds, read_decoder
from jaxkv.models.families.experts import read_mixtral, read_router
from jaxkv.models.rope_config import read_rope, rope_section
from jaxkv.models.spec import ModelSpec, RopeSpec


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    biased = attn_biased(config)
    biased += ("head",) * config.flag("lm_head_bias", False)
    experts = read_mixtral(config)
    if config.get("num_experts_per_tok") != 2:
        raise config.fail("num_experts_per_tok", "2 (the router chooses one, then another)")
    return read_decoder(
        config,
        biased=(*biased, "attn_norm", "mlp_norm", "norm"),
        kinds=mistral_kinds(config),
        ropes=[_rope(config)] * config.num_layers,
        norm="layer",
        experts=experts.leaves,
        router=read_router(
            config,
            experts.count,
            used="num_experts_per_tok",
            margin=2 * config.number("router_jitter_noise", 0.01),
        ),
    )


def _rope(config: ConfigReader) -> RopeSpec:
    """Reads the embedding, whose factor on cos and sin has a name of its own, of whatever kind it
    is. Long sequences have `long_factor`, as in the model's own code, where transformers 5.24 takes
    `short_factor` for them too.
    """
    rope = read_rope(config)
    if rope.kind == "default":
        return rope
    section = rope_section(config)
    short, long = section.number("short_mscale"), section.number("long_mscale")
    if short != long:
        raise section.fail("long_mscale", f"that of short sequences, {short} (else not built)")
    return replace(rope, attention_factor=short)
