"""Falcon: attention and MLP side by side; keys and values of one head, or of some, fused with the
queries; rotated, or with scores that fall with distance. Source: arXiv 2311.16867.
"""

from __future__ import annotations

from dataclasses import replace

from jaxkv.models.alibi import MAX_HEADS, MAX_LEN, slopes, with_slopes
from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import QKV, Layout, Names, read_decoder
from jaxkv.models.spec import ModelSpec

NAMES = Names(
    embed="transformer.word_embeddings",
    norm="transformer.ln_f",
    layer="transformer.h.{layer}.",
    mlp_norm=None,
    qkv="self_attention.query_key_value",
    o="self_attention.dense",
    gate=None,
    up="mlp.dense_h_to_4h",
    down="mlp.dense_4h_to_h",
)


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    falls = config.flag("alibi", False)
    is_new = config.flag("new_decoder_architecture", False)
    names, heads = NAMES, config.size("num_attention_heads", at_most=MAX_HEADS)
    kv_heads = 1 if config.flag("multi_query", True) else heads
    if is_new:
        kv_heads = config.size("num_kv_heads", heads)
    if is_new and config.get("num_ln_in_parallel_attn", 2) == 2:
        names = replace(NAMES, attn_norm="ln_attn", mlp_norm="ln_mlp")
    elif not is_new and not config.flag("parallel_attn", True):
        names = replace(NAMES, mlp_norm="post_attention_layernorm")
    width = config.get("ffn_hidden_size") or 4 * config.size("hidden_size")
    spec, layout = read_decoder(
        config.replaced(num_key_value_heads=kv_heads, intermediate_size=width),
        names=names,
        biased=("attn_norm", "mlp_norm", "norm")
        + (*QKV, "o", "up", "down") * config.flag("bias", False),
        fused_by_head=True,
        eps="layer_norm_epsilon",
        activation="activation",
        norm="layer",
        is_parallel=is_new or config.flag("parallel_attn", True),
        ropes=[None] * config.num_layers if falls else None,
    )
    if not falls:
        return spec, layout
    config.size("max_position_embeddings", 2048, at_most=MAX_LEN)
    # Falcon scales its scores when they have fallen.
    return with_slopes(spec, tuple(one * spec.head_dim**-0.5 for one in slopes(heads))), layout
