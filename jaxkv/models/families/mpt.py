"""MPT: scores that fall with distance, nothing has a bias. Source: the model's card,
mosaicml/mpt-7b.
"""

from __future__ import annotations

from jaxkv.models.alibi import MAX_HEADS, MAX_LEN, slopes, with_slopes
from jaxkv.models.config_reader import MAX_LAYERS, ConfigReader
from jaxkv.models.families.base import Layout, Names, read_decoder
from jaxkv.models.spec import AttentionSpec, ModelSpec

NAMES = Names(
    embed="transformer.wte",
    norm="transformer.norm_f",
    layer="transformer.blocks.{layer}.",
    attn_norm="norm_1",
    mlp_norm="norm_2",
    qkv="attn.Wqkv",
    o="attn.out_proj",
    gate=None,
    up="ffn.up_proj",
    down="ffn.down_proj",
)


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    config.refuse("expansion_ratio", 4)
    config.refuse("logit_scale")
    config.refuse("no_bias", True)
    own = config.section("attn_config")
    for key, built in (("alibi", True), ("prefix_lm", False), ("qk_ln", False)):
        own.refuse(key, built)
    own.refuse("attn_type", "multihead_attention")
    heads, hidden = config.size("n_heads", at_most=MAX_HEADS), config.size("d_model")
    config = config.replaced(
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        num_hidden_layers=config.size("n_layers", at_most=MAX_LAYERS),
        max_position_embeddings=config.size("max_seq_len", 2048, at_most=MAX_LEN),
        intermediate_size=4 * hidden,
        hidden_act="gelu",
    )
    scale = None if own.get("softmax_scale") is None else own.number("softmax_scale")
    spec, layout = read_decoder(
        config,
        names=NAMES,
        ropes=[None] * config.num_layers,
        eps="layer_norm_epsilon",
        norm="layer",
        attention=AttentionSpec(clip=own.cap("clip_qkv"), scale=scale),
    )
    return with_slopes(spec, slopes(heads, steepest=own.number("alibi_bias_max", 8))), layout
