"""Doge: scores to which each key adds what it is worth, and a stream that each layer weighs before
it adds to it. Source: arXiv 2508.02124, and the model's card, SmallDoge/Doge-320M.
"""

from __future__ import annotations

from dataclasses import replace

from jaxkv.models.boosts import BOOST, GAIN, NUM_DIMS
from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import (
    LAYER,
    QK_NORMED,
    Layout,
    attn_biased,
    leaf,
    mistral_kinds,
    mlp_biased,
    read_decoder,
)
from jaxkv.models.spec import ModelSpec


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    # In transformers a token's experts depend on how many tokens are computed with it.
    config.refuse("is_moe", False)
    biased = attn_biased(config)
    spec, layout = read_decoder(
        config, names=QK_NORMED, biased=(*biased, *mlp_biased(config)), kinds=mistral_kinds(config)
    )
    heads, hidden = spec.groups[0].num_kv_heads, (spec.hidden_size,)
    source, shape = f"{LAYER}self_attn.dt_proj", (heads, heads * spec.head_dim)
    own = {
        BOOST: leaf(f"{source}.weight", shape, (None, "kv_heads")),
        GAIN: leaf(f"{LAYER}self_attn.A", (heads,), (None,)),
        "attn_kept": leaf(f"{LAYER}input_residual", hidden, ("model",)),
        "mlp_kept": leaf(f"{LAYER}post_attention_residual", hidden, ("model",)),
    }
    if biased:
        own[f"{BOOST}_bias"] = leaf(f"{source}.bias", (heads,), (None,))
    groups = tuple(replace(one, head_dim=one.head_dim + NUM_DIMS) for one in spec.groups)
    # Of longer sequences a query would choose among keys by what they are worth.
    max_len = min(spec.max_len, config.size("keep_window_size"))
    spec = replace(spec, rope=replace(spec.rope, dim=spec.head_dim), groups=groups, max_len=max_len)
    return spec, layout.in_each_layer(**own)
