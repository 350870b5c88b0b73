"""StarCoder 1 and SantaCoder: GPT-2 whose queries share one KV head. Source: arXiv 2305.06161."""

from __future__ import annotations

from jaxkv.models.config_reader import MAX_LAYERS, ConfigReader
from jaxkv.models.families.base import QKV, Layout, read_decoder
from jaxkv.models.families.gpt2 import KEYS, MASKS, NAMES, with_width
from jaxkv.models.spec import AttentionSpec, ModelSpec


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    config.refuse("add_cross_attention", False)
    has_one = config.flag("multi_query", True)
    keys = KEYS | {"num_key_value_heads": "num_key_value_heads"}
    heads = {"num_key_value_heads": 1 if has_one else config.size("n_head")}
    spec, layout = read_decoder(
        with_width(config).replaced(**heads).renamed(**keys),
        names=NAMES,
        biased=("attn_norm", *QKV, "o", "mlp_norm", "up", "down", "norm"),
        ropes=[None] * config.size("n_layer", at_most=MAX_LAYERS),
        # With a KV head for each query head the rows are fused by head.
        fused_by_head=not has_one,
        eps="layer_norm_epsilon",
        activation="activation_function",
        norm="layer",
        attention=AttentionSpec(scale=None if config.flag("scale_attn_weights", True) else 1.0),
    )
    return spec, layout.with_unread(MASKS)
