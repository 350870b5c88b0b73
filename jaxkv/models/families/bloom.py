"""BLOOM: scores that fall with distance, a norm behind the embeddings. Source: arXiv 2211.05100."""

from __future__ import annotations

from jaxkv.models.alibi import MAX_HEADS, MAX_LEN, slopes, with_slopes
from jaxkv.models.config_reader import MAX_LAYERS, ConfigReader
from jaxkv.models.families.base import QKV, Layout, Names, leaf, read_decoder
from jaxkv.models.spec import ModelSpec

NAMES = Names(
    embed="transformer.word_embeddings",
    norm="transformer.ln_f",
    layer="transformer.h.{layer}.",
    qkv="self_attention.query_key_value",
    o="self_attention.dense",
    gate=None,
    up="mlp.dense_h_to_4h",
    down="mlp.dense_4h_to_h",
)


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    config.refuse("apply_residual_connection_post_layernorm", False)
    if config.get("n_embed") is not None:
        config = config.replaced(hidden_size=config.size("n_embed"))
    heads = config.size("n_head", at_most=MAX_HEADS)
    config = config.replaced(
        num_attention_heads=heads,
        num_key_value_heads=heads,
        num_hidden_layers=config.size("n_layer", at_most=MAX_LAYERS),
        max_position_embeddings=config.size("seq_length", 2048, at_most=MAX_LEN),
        intermediate_size=4 * config.size("hidden_size"),
        hidden_act="gelu_new",
    )
    spec, layout = read_decoder(
        config,
        names=NAMES,
        biased=("attn_norm", *QKV, "o", "mlp_norm", "up", "down", "norm"),
        ropes=[None] * config.num_layers,
        fused_by_head=True,
        eps="layer_norm_epsilon",
        norm="layer",
    )
    name, size = "transformer.word_embeddings_layernorm", (spec.hidden_size,)
    layout = layout.with_top(
        embed_norm=leaf(f"{name}.weight", size, ("model",)),
        embed_norm_bias=leaf(f"{name}.bias", size, ("model",)),
    )
    return with_slopes(spec, slopes(heads)), layout
