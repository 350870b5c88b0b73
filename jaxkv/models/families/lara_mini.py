"""Lara 4 Mini: Gated DeltaNet, windows that are rotated and full attention that is not, and experts
beside one for all tokens. Source: the model's card, translated/Lara-4-Mini-Base.
"""

from __future__ import annotations

from dataclasses import replace

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import FULL, QK_NORMED, SLIDING, Layout, attn_biased, read_decoder
from jaxkv.models.families.delta import (
    CONV_ACTIVATIONS,
    LINEAR,
    MIXED,
    matrices_of,
    read_gated_delta,
    rest_of,
)
from jaxkv.models.families.experts import read_router
from jaxkv.models.families.hybrid import with_mixer
from jaxkv.models.families.qwen3_moe import read_experts
from jaxkv.models.families.qwen3_next import PREFIX
from jaxkv.models.rope_config import read_rope
from jaxkv.models.spec import ModelSpec

PERIOD = (LINEAR, SLIDING, LINEAR, FULL, SLIDING)
SPELLINGS = ((r"\.linear_attn\.norm\.", ".linear_attn.out_norm."),)


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    kinds = _kinds(config)
    rope = read_rope(config)
    experts = replace(
        read_experts(config),
        fused=("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
        shared="mlp.shared_expert.",
        shared_width=config.size("shared_expert_intermediate_size"),
    )
    found = read_decoder(
        # No layer is dense, and configs say nothing of how wide one would be.
        config.replaced(intermediate_size=config.size("moe_intermediate_size")),
        names=QK_NORMED,
        biased=attn_biased(config),
        kinds=[FULL if kind == LINEAR else kind for kind in kinds],
        ropes=[rope if kind == SLIDING else None for kind in kinds],
        activations=CONV_ACTIVATIONS,
        experts=experts.leaves,
        router=read_router(
            config,
            experts.count,
            used="num_experts_per_tok",
            is_normalised=config.flag("norm_topk_prob", True),
        ),
    )
    mixer = read_gated_delta(config, norm_eps=config.number("rms_norm_eps", 1e-6))
    hidden, names = found[0].hidden_size, (*MIXED, "delta_gate", "delta_b", "delta_step")
    leaves = matrices_of(mixer, f"{PREFIX}in_proj", names, hidden)
    leaves |= rest_of(mixer, PREFIX, hidden, conv="conv1d", norm="out_norm", out="out_proj")
    linear = [layer for layer, kind in enumerate(kinds) if kind == LINEAR]
    spec, layout = with_mixer(found, linear, mixer, leaves)
    return spec, replace(layout, spellings=SPELLINGS)


def _kinds(config: ConfigReader) -> list[str]:
    num_layers = config.num_layers
    otherwise = [PERIOD[layer % len(PERIOD)] for layer in range(num_layers)]
    return config.kinds("layer_types", num_layers, (LINEAR, SLIDING, FULL), otherwise)
