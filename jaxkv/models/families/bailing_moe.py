"""Ling and Ring of inclusionAI: the first with experts by softmax, the second with norms of queries
and keys, partly rotated heads and the experts of DeepSeek V3. Sources: arXiv 2503.05139 and
2510.22115; vLLM's BailingMoeForCausalLM and BailingMoeV2ForCausalLM.
"""

from __future__ import annotations

from dataclasses import replace

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import QKV, Layout, Names, read_decoder
from jaxkv.models.families.experts import Experts, first_dense, read_grouped
from jaxkv.models.spec import ModelSpec
from jaxkv.ops.experts import Router

NAMES = Names(
    embed="model.word_embeddings",
    qkv="attention.query_key_value",
    o="attention.dense",
)
NORMS = {"q_norm": "attention.query_layernorm", "k_norm": "attention.key_layernorm"}
RENAMED = {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"}
HARMLESS = {
    "use_rmsnorm": True,
    "moe_router_enable_routed_scaling": True,
    "moe_router_enable_shared_expert": True,
    **dict.fromkeys(("norm_head", "norm_softmax", "use_bias", "multi_gate"), False),
    "use_sliding_window": False,
}
"""Keys of published configs, with what they say in those that are read. Some of the first Ling have
a `norm_head`, whose columns are divided by their lengths.
"""

FIRST = {"rms_norm_eps": 1e-5, "max_position_embeddings": 16384}
SECOND = {
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32768,
    "rope_theta": 6e5,
    "use_qk_norm": True,
    "first_k_dense_replace": 1,
    "num_shared_experts": 1,
    "n_group": 8,
    "topk_group": 4,
}
"""What the authors' classes of configs, which transformers does not have, take for keys that a file
leaves out. Their model_type is the same: scores of experts tell the two apart.
"""


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    config = config.renamed(**RENAMED)
    for key, harmless in HARMLESS.items():
        config.refuse(key, harmless)
    is_second = config.choice("score_function", "softmax", ("sigmoid", "softmax")) == "sigmoid"
    config = config.with_defaults(SECOND if is_second else FIRST)
    config = _rotated(config, is_second=is_second)
    experts, router = _read_experts(config, is_second=is_second)
    has_norms = config.flag("use_qk_norm", False)
    return read_decoder(
        config,
        names=replace(NAMES, **NORMS) if has_norms else NAMES,
        biased=QKV * config.flag("use_qkv_bias", False),
        partly=True,
        activations=("silu",),
        experts=experts.leaves,
        is_dense=first_dense(config),
        router=router,
    )


def _rotated(config: ConfigReader, *, is_second: bool) -> ConfigReader:
    """Returns the config with the part of heads that is rotated under one key: Ling-1T says its
    size.
    """
    key, size = "partial_rotary_factor", "rotary_dim"
    if config.get(size) is None:
        if is_second and config.get(key) is None:
            raise config.fail(key, f"a number, or {size}: classes of the authors differ in it")
        return config
    part = config.size(size) / config.head_dim
    if config.number(key, part) != part:
        raise config.fail(size, f"the part of head_dim={config.head_dim} that {key} says")
    return config.replaced(partial_rotary_factor=part)


def _read_experts(config: ConfigReader, *, is_second: bool) -> tuple[Experts, Router]:
    """Reads experts, which a bias helps to choose where scores are sigmoid."""
    config.refuse("moe_router_enable_expert_bias", is_second)
    if not is_second:
        config.refuse("n_group", 1)
    experts, router = read_grouped(config)
    width = config.size("moe_shared_expert_intermediate_size", experts.width)
    num_shared = config.size("n_shared_experts", 0, at_least=0)
    experts = replace(
        experts,
        bias="mlp.gate.expert_bias" if is_second else None,
        shared_width=num_shared * width,
    )
    return experts, router if is_second else replace(router, score="softmax", by_two=False)
