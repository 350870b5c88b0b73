"""DBRX: experts whose weights are one below the other in three tensors, clipped queries, keys and
values. Source: the model's card, databricks/dbrx-base.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from jaxkv.models.config_reader import MAX_LAYERS, ConfigReader
from jaxkv.models.families.base import Layout, Leaf, Names, Part, read_decoder
from jaxkv.models.families.experts import MAX_EXPERTS, Experts, read_router
from jaxkv.models.spec import AttentionSpec, ModelSpec

NAMES = Names(
    embed="transformer.wte",
    norm="transformer.norm_f",
    layer="transformer.blocks.{layer}.",
    attn_norm="norm_attn_norm.norm_1",
    mlp_norm="norm_attn_norm.norm_2",
    qkv="norm_attn_norm.attn.Wqkv",
    o="norm_attn_norm.attn.out_proj",
)


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    own, ffn = config.section("attn_config"), config.section("ffn_config")
    experts = Experts(
        count=ffn.size("moe_num_experts", 4, at_most=MAX_EXPERTS),
        width=ffn.size("ffn_hidden_size", 3584),
        router="ffn.router.layer",
    )
    ffn.refuse("moe_normalize_expert_weights", 1.0)
    act = ffn.section("ffn_act_fn")
    for key in act.values.keys() - {"name"}:
        act.refuse(key)
    config = config.replaced(
        hidden_size=config.size("d_model"),
        num_attention_heads=config.size("n_heads"),
        num_key_value_heads=own.size("kv_n_heads", 1),
        num_hidden_layers=config.size("n_layers", at_most=MAX_LAYERS),
        max_position_embeddings=config.size("max_seq_len", 2048),
        intermediate_size=experts.width,
        hidden_act=act.get("name", "silu"),
    )
    if config.get("rope_parameters") is None and own.get("rope_theta") is not None:
        config = config.replaced(rope_theta=own.number("rope_theta"))

    def leaves(prefix: str, hidden: int) -> Mapping[str, Leaf]:
        whole = Part(shape=(experts.count * experts.width, hidden))
        turned = replace(whole, num_blocks=experts.count, by_column=True)
        found = experts.leaves(prefix, hidden)
        parts = {"gate": ("w1", whole), "up": ("v1", whole), "down": ("w2", turned)}
        for name, (tensor, part) in parts.items():
            source = f"{prefix}ffn.experts.mlp.{tensor}"
            found[f"expert_{name}"] = replace(found[f"expert_{name}"], source=source, part=part)
        return found

    return read_decoder(
        config,
        names=NAMES,
        eps=None,
        norm="layer",
        attention=AttentionSpec(clip=own.cap("clip_qkv")),
        experts=leaves,
        router=read_router(
            ffn,
            experts.count,
            used="moe_top_k",
            is_normalised=ffn.values.get("moe_normalize_expert_weights", 1.0) is not None,
        ),
    )
