"""OLMo 2: norms behind attention and MLP, and over all queries and keys. Source: arXiv
2501.00656.
"""

from __future__ import annotations

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import POST_NORMED, Layout, attn_biased, read_decoder
from jaxkv.models.spec import AttentionSpec, ModelSpec


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    return read_decoder(
        config,
        names=POST_NORMED,
        biased=attn_biased(config),
        attention=AttentionSpec(qk_norm="whole"),
    )
