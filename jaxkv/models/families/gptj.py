"""GPT-J: attention and MLP side by side behind one LayerNorm, partly rotated heads, interleaved.
Source: the model's card, EleutherAI/gpt-j-6b.
"""

from __future__ import annotations

from jaxkv.models.config_reader import MAX_LAYERS, ConfigReader
from jaxkv.models.families.base import Layout, Names, read_decoder
from jaxkv.models.families.gpt2 import KEYS, MASKS, with_width
from jaxkv.models.spec import ModelSpec, RopeSpec

NAMES = Names(
    embed="transformer.wte",
    norm="transformer.ln_f",
    layer="transformer.h.{layer}.",
    attn_norm="ln_1",
    mlp_norm=None,
    q="attn.q_proj",
    k="attn.k_proj",
    v="attn.v_proj",
    o="attn.out_proj",
    gate=None,
    up="mlp.fc_in",
    down="mlp.fc_out",
)


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    head_dim = max(1, config.size("n_embd") // config.size("n_head"))
    dim = config.size("rotary_dim", head_dim, at_most=head_dim)
    if dim % 2:
        raise config.fail("rotary_dim", "an even number")
    rope = RopeSpec(dim=0 if dim == head_dim else dim, interleaved=True)
    spec, layout = read_decoder(
        with_width(config).renamed(**KEYS),
        names=NAMES,
        biased=("attn_norm", "up", "down", "norm", "head"),
        ropes=[rope] * config.size("n_layer", at_most=MAX_LAYERS),
        eps="layer_norm_epsilon",
        activation="activation_function",
        norm="layer",
        is_parallel=True,
    )
    return spec, layout.with_unread(MASKS)
