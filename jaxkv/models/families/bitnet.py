"""BitNet b1.58: norms of what attention and MLP have computed before it is projected back, and a
squared ReLU as the gate. Source: arXiv 2504.12285, section 2.
"""

from __future__ import annotations

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import LAYER, Layout, attn_biased, leaf, read_decoder
from jaxkv.models.spec import ModelSpec


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    spec, layout = read_decoder(config, biased=attn_biased(config))
    width = spec.num_heads * spec.head_dim
    if width != spec.hidden_size:
        raise config.fail("head_dim", f"hidden_size={spec.hidden_size} / num_attention_heads")
    ffn = config.size("intermediate_size")
    norms = {
        "o_norm": leaf(f"{LAYER}self_attn.attn_sub_norm.weight", (width,), ("heads",)),
        "down_norm": leaf(f"{LAYER}mlp.ffn_sub_norm.weight", (ffn,), ("ffn",)),
    }
    return spec, layout.in_each_layer(**norms)
