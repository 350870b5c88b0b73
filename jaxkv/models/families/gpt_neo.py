"""GPT-Neo: learned positions, scores without a scale, a window in every other layer. Source: the
model's card, EleutherAI/gpt-neo-2.7B.
"""

from __future__ import annotations

from typing import Any

from jaxkv.config import is_int
from jaxkv.models.config_reader import MAX_LAYERS, ConfigReader
from jaxkv.models.families.base import FULL, SLIDING, Layout, Names, read_decoder
from jaxkv.models.families.gpt2 import MASKS
from jaxkv.models.spec import AttentionSpec, ModelSpec

NAMES = Names(
    embed="transformer.wte",
    positions="transformer.wpe",
    norm="transformer.ln_f",
    layer="transformer.h.{layer}.",
    attn_norm="ln_1",
    mlp_norm="ln_2",
    q="attn.attention.q_proj",
    k="attn.attention.k_proj",
    v="attn.attention.v_proj",
    o="attn.attention.out_proj",
    gate=None,
    up="mlp.c_fc",
    down="mlp.c_proj",
)
KINDS = {"global": FULL, "local": SLIDING}


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    num_layers = config.size("num_layers", at_most=MAX_LAYERS)
    kinds = _kinds(config, num_layers)
    width = config.size("intermediate_size", 4 * config.size("hidden_size"))
    own = {
        "num_hidden_layers": num_layers,
        "num_attention_heads": config.size("num_heads"),
        "intermediate_size": width,
        "sliding_window": config.size("window_size", 256),
    }
    spec, layout = read_decoder(
        config.replaced(**own, num_key_value_heads=None, head_dim=None),
        names=NAMES,
        biased=("attn_norm", "mlp_norm", "norm", "o", "up", "down"),
        kinds=kinds,
        ropes=[None] * num_layers,
        eps="layer_norm_epsilon",
        activation="activation_function",
        norm="layer",
        attention=AttentionSpec(scale=1.0),
    )
    return spec, layout.with_unread(MASKS)


def _kinds(config: ConfigReader, num_layers: int) -> list[str]:
    """Reads `attention_layers`, or how often each list of `attention_types` comes; without either
    every second layer has a window.
    """
    if config.get("attention_layers") is not None:
        given = config.kinds("attention_layers", num_layers, tuple(KINDS))
        return [KINDS[kind] for kind in given]
    types = config.get("attention_types")
    if types is None:
        return [SLIDING if layer % 2 else FULL for layer in range(num_layers)]
    listed: list[str] = []
    for one in types if isinstance(types, list) else [None]:
        pair: Any = one if isinstance(one, list) and len(one) == 2 else (None, None)
        names, count = pair
        if not isinstance(names, list) or not is_int(count) or not 0 <= count <= MAX_LAYERS:
            raise config.fail("attention_types", "a list of pairs, kinds of layers and how often")
        if len(listed) + len(names) * count > num_layers:  # before a list of billions is made
            raise config.fail("attention_types", f"kinds of {num_layers} layers in all")
        listed += names * count
    shown = ConfigReader({"attention_types": listed}, config.where)
    return [KINDS[kind] for kind in shown.kinds("attention_types", num_layers, tuple(KINDS))]
