"""Gemma: embeddings times sqrt(D), norms whose weights are stored less one. Source: arXiv
2403.08295.
"""

from __future__ import annotations

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import Layout, attn_biased, read_decoder
from jaxkv.models.spec import ModelSpec, Scales


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    # Early files name an exact GELU in hidden_act and mean the one by tanh, whether or not
    # hidden_activation says so, which transformers does not read.
    if config.get("hidden_act") == "gelu":
        config = config.replaced(hidden_act="gelu_pytorch_tanh")
    return read_decoder(
        config,
        biased=attn_biased(config),
        norm="rms_one",
        scales=Scales(embed=config.size("hidden_size") ** 0.5, embed_is_rounded=True),
    )
