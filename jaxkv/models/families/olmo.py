"""OLMo: LayerNorms without weights, queries, keys and values that may be clipped. Source: arXiv
2402.00838.
"""

from __future__ import annotations

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import Layout, Names, attn_biased, read_decoder
from jaxkv.models.spec import AttentionSpec, ModelSpec


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    return read_decoder(
        config,
        names=Names(attn_norm=None, mlp_norm=None, norm=None),
        biased=attn_biased(config),
        eps=None,
        norm="layer",
        unit_norms=("attn_norm", "mlp_norm", "norm"),
        attention=AttentionSpec(clip=config.cap("clip_qkv")),
    )
