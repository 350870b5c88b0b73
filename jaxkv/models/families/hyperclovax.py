"""HyperCLOVA X: Granite with norms behind attention and MLP where the config asks for them. Source:
arXiv 2506.22403.
"""

from __future__ import annotations

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import Layout, Names, attn_biased, mlp_biased, read_decoder
from jaxkv.models.spec import AttentionSpec, ModelSpec, Scales


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    biased = attn_biased(config) + mlp_biased(config)
    after = Names(post_attn_norm="post_norm1", post_mlp_norm="post_norm2")
    return read_decoder(
        config,
        names=after if config.flag("use_post_norm", True) else Names(),
        biased=biased,
        scales=Scales(
            embed=config.number("embedding_multiplier", 1.0),
            residual=config.number("residual_multiplier", 1.0),
            logits=config.number("logits_scaling", 1.0),
        ),
        attention=AttentionSpec(scale=config.number("attention_multiplier", config.head_dim**-0.5)),
    )
