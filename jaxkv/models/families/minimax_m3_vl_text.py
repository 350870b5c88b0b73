"""The text part of MiniMax-M3: layers whose KV heads choose the blocks of keys that they attend to,
and experts as gpt-oss computes them, chosen as MiniMax-M2 does. Source: transformers'
minimax_m3_vl.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import (
    FULL,
    LAYER,
    QK_NORMED,
    Layout,
    Leaf,
    Names,
    leaf,
    read_decoder,
)
from jaxkv.models.families.experts import Experts, listed_dense, read_mixtral, read_router
from jaxkv.models.families.gpt_oss import refuse_other_gates
from jaxkv.models.families.hybrid import with_leaves
from jaxkv.models.spec import AttentionSpec, BlockIndexSpec, ModelSpec
from jaxkv.ops.attention.sweep import BLOCK
from jaxkv.ops.layers import CLAMPED

SPARSE = "minimax_m3_sparse"
PUBLISHED = {
    "index_n_heads": "sparse_num_index_heads",
    "index_head_dim": "sparse_index_dim",
    "index_block_size": "sparse_block_size",
    "index_topk_blocks": "sparse_topk_blocks",
    "index_local_blocks": "sparse_local_block",
}
"""How a section of published configs calls what transformers has beside the other keys."""


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    refuse_other_gates(config)
    config = _flat(config)
    num_layers = config.num_layers
    kinds = config.kinds("layer_types", num_layers, (FULL, SPARSE), [FULL] * num_layers)
    published = replace(
        read_mixtral(config, bias="block_sparse_moe.e_score_correction_bias"),
        shared="block_sparse_moe.shared_experts.",
        shared_width=config.size("shared_intermediate_size"),
    )
    spec, layout = _read(config, kinds, QK_NORMED, published, "self_attn.index_")
    alone = replace(
        published,
        router="mlp.gate",
        bias="mlp.gate.e_score_correction_bias",
        fused=("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
        shared="mlp.shared_experts.",
        shared_fused=("gate_up_proj.weight", "down_proj.weight"),
    )
    names = replace(QK_NORMED, gate_up="mlp.gate_up_proj")
    _, other = _read(config, kinds, names, alone, "self_attn.indexer.")
    return spec, replace(layout, also=other.layers)


def _read(
    config: ConfigReader, kinds: Sequence[str], names: Names, experts: Experts, prefix: str
) -> tuple[ModelSpec, Layout]:
    """Reads the model with its tensors called so, those of what chooses keys behind a prefix.
    transformers has other names for the text part alone, and writes them.
    """
    router = read_router(
        config,
        experts.count,
        used="num_experts_per_tok",
        score="sigmoid",
        is_normalised=True,
        scale=config.number("routed_scaling_factor", 1.0),
    )
    index = _index(config)
    spec, layout = read_decoder(
        config.replaced(intermediate_size=config.size("dense_intermediate_size")),
        names=names,
        partly=True,
        norm="rms_one",
        attention=AttentionSpec(index=index if SPARSE in kinds else None),
        experts=experts.leaves,
        router=router,
        is_dense=listed_dense(config),
    )
    spec = replace(spec, activation=CLAMPED)  # whatever hidden_act says
    if SPARSE not in kinds:
        return spec, layout
    (group,), rotated = spec.groups, spec.rope.dim or spec.head_dim
    if index.head_dim > group.head_dim:
        raise config.fail("index_head_dim", f"at most the {group.head_dim} of head_dim")
    if config.size("index_n_heads") != group.num_kv_heads:
        raise config.fail("index_n_heads", f"{group.num_kv_heads}, one for each KV head")
    if index.head_dim < rotated:
        raise config.fail("index_head_dim", f"at least the {rotated} that are rotated")
    own = _index_leaves(LAYER + prefix, group.num_kv_heads, index.head_dim, spec.hidden_size)
    sparse = [layer for layer, kind in enumerate(kinds) if kind == SPARSE]
    found = with_leaves((spec, layout), sparse, lambda leaves: {**leaves, **own})
    spec, layout = found
    return replace(spec, groups=(replace(group, has_index_key=True),)), layout


def _flat(config: ConfigReader) -> ConfigReader:
    """Returns the config with transformers' keys for those that only published files have."""
    found: dict[str, Any] = {}
    if config.get("sparse_attention_config") is not None:
        section = config.section("sparse_attention_config")
        given = {key: section.get(old) for key, old in PUBLISHED.items()}
        found |= {key: value for key, value in given.items() if value is not None}
        if config.get("layer_types") is None and section.get("sparse_attention_freq") is not None:
            marks = section.whole_numbers("sparse_attention_freq", at_least=0, at_most=1)
            found["layer_types"] = [SPARSE if mark else FULL for mark in marks]
    if config.get("mlp_layer_types") is None and config.get("moe_layer_freq") is not None:
        marks = config.whole_numbers("moe_layer_freq", at_least=0, at_most=1)
        found["mlp_layer_types"] = ["sparse" if mark else "dense" for mark in marks]
    return config.replaced(**found)


def _index(config: ConfigReader) -> BlockIndexSpec:
    size = config.size("index_block_size")
    if BLOCK % size:  # blocks would lie across those that are read at once
        raise config.fail("index_block_size", f"a divisor of {BLOCK} (nothing else is built)")
    num_chosen = config.size("index_topk_blocks")
    num_local = config.size("index_local_blocks", at_least=0)
    if num_local > num_chosen:
        raise config.fail("index_local_blocks", f"at most the {num_chosen} of index_topk_blocks")
    return BlockIndexSpec(
        head_dim=config.size("index_head_dim"),
        num_chosen=num_chosen,
        pool=size,
        num_local=num_local,
    )


def _index_leaves(prefix: str, num_kv_heads: int, head_dim: int, hidden: int) -> Mapping[str, Leaf]:
    """Describes the arrays of index heads."""

    def norm(name: str) -> Leaf:
        return leaf(f"{prefix}{name}_norm.weight", (head_dim,), (None,))

    queries = (num_kv_heads * head_dim, hidden), ("kv_heads", "model")
    return {
        "index_q": leaf(f"{prefix}q_proj.weight", *queries),
        "index_k": leaf(f"{prefix}k_proj.weight", (head_dim, hidden), (None, "model")),
        "index_q_norm": norm("q"),
        "index_k_norm": norm("k"),
    }
