"""InternLM2 and 2.5: Llama whose queries, keys and values are one matrix, KV head by KV head.
Sources: arXiv 2403.17297, section 2.2; vLLM's InternLM2ForCausalLM.
"""

from __future__ import annotations

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import QKV, Layout, Names, read_decoder
from jaxkv.models.spec import ModelSpec

NAMES = Names(
    embed="model.tok_embeddings",
    head="output",
    attn_norm="attention_norm",
    mlp_norm="ffn_norm",
    qkv="attention.wqkv",
    o="attention.wo",
    gate="feed_forward.w1",
    up="feed_forward.w3",
    down="feed_forward.w2",
)


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    # Its authors' InternLM2Config, which transformers does not have, has biases by default.
    biased = (*QKV, "o") * config.flag("bias", True)
    return read_decoder(config, names=NAMES, biased=biased, fused_by_head=True)
