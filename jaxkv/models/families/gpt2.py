"""GPT-2: positions that are learned, weights stored [in, out]. Source: Radford et al., Language
Models are Unsupervised Multitask Learners (2019).
"""

from __future__ import annotations

from jaxkv.models.config_reader import MAX_LAYERS, ConfigReader
from jaxkv.models.families.base import QKV, Layout, Names, read_decoder
from jaxkv.models.spec import AttentionSpec, ModelSpec

KEYS = {
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "num_key_value_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "max_position_embeddings": "n_positions",
    "intermediate_size": "n_inner",
}
NAMES = Names(
    embed="transformer.wte",
    positions="transformer.wpe",
    norm="transformer.ln_f",
    layer="transformer.h.{layer}.",
    attn_norm="ln_1",
    mlp_norm="ln_2",
    qkv="attn.c_attn",
    o="attn.c_proj",
    gate=None,
    up="mlp.c_fc",
    down="mlp.c_proj",
)


MASKS = r"transformer\.h\.\d+\.attn\.(attention\.)?(masked_)?bias"
"""Tensors that say which positions a token sees."""


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    config.refuse("add_cross_attention", False)
    spec, layout = read_decoder(
        with_width(config).renamed(**KEYS),
        names=NAMES,
        biased=("attn_norm", *QKV, "o", "mlp_norm", "up", "down", "norm"),
        ropes=[None] * config.size("n_layer", at_most=MAX_LAYERS),
        transposed=True,
        eps="layer_norm_epsilon",
        activation="activation_function",
        norm="layer",
        attention=AttentionSpec(
            scale=None if config.flag("scale_attn_weights", True) else 1.0,
            by_depth=config.flag("scale_attn_by_inverse_layer_idx", False),
        ),
    )
    return spec, layout.with_unread(MASKS)


def with_width(config: ConfigReader) -> ConfigReader:
    """Returns a reader in which the width of the MLP is never left out."""
    width = config.get("n_inner") or 4 * config.size("n_embd")
    return config.replaced(n_inner=width)
