"""GLM-4-0414: GLM with norms behind attention and MLP. Source: the model's card,
THUDM/GLM-4-32B-0414.
"""

from __future__ import annotations

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import QKV, Layout, Names, read_decoder
from jaxkv.models.spec import ModelSpec


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    return read_glm4(config, has_biases=config.flag("attention_bias", True))


def read_glm4(config: ConfigReader, *, has_biases: bool) -> tuple[ModelSpec, Layout]:
    """Reads GLM-4, or a family that is alike. has_biases: queries, keys and values have some."""
    return read_decoder(
        config,
        names=Names(
            gate_up="mlp.gate_up_proj",
            post_attn_norm="post_self_attn_layernorm",
            post_mlp_norm="post_mlp_layernorm",
        ),
        biased=QKV * has_biases,
        interleaved=True,
        partly=True,
    )
