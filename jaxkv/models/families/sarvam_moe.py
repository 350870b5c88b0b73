"""Sarvam 30B: GLM-4.5 with heads that are rotated whole. Source: the model's card,
sarvamai/sarvam-30b.
"""

from __future__ import annotations

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import Layout, Names
from jaxkv.models.families.glm4_moe import read_glm4_moe
from jaxkv.models.spec import ModelSpec

OWN = {
    "num_experts": "n_routed_experts",
    "num_shared_experts": "n_shared_experts",
    "use_qkv_bias": "attention_bias",
    "num_mtp_layers": "num_nextn_predict_layers",
}
"""Maps keys as the published config has them to those of GLM-4.5."""

NAMES = Names(
    embed="model.word_embeddings",
    qkv="attention.query_key_value",
    o="attention.dense",
    q_norm="attention.query_layernorm",
    k_norm="attention.key_layernorm",
)


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    named = {theirs: config.get(own) for own, theirs in OWN.items() if config.get(own) is not None}
    return read_glm4_moe(
        config.replaced(**named),
        names=NAMES,
        bias="mlp.gate.expert_bias",
    )
