"""MiniCPM 1 and 2: Llama with factors on embeddings, what joins the stream and logits. Source:
arXiv 2404.06395, appendix A.1.
"""

from __future__ import annotations

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import Layout, read_decoder
from jaxkv.models.spec import ModelSpec, Scales


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    config.refuse("num_experts", 0)
    # Its authors' MiniCPMConfig, which transformers does not have: files say only what differs.
    defaults = {"scale_emb": 1, "scale_depth": 1, "dim_model_base": 1, "tie_word_embeddings": True}
    config = config.with_defaults(defaults)
    return read_decoder(config, scales=read_scales(config))


def read_scales(config: ConfigReader) -> Scales:
    """Reads MiniCPM's factors; one that is null changes nothing."""
    hidden, depth = config.size("hidden_size"), config.num_layers
    return Scales(
        embed=config.number("scale_emb", 1.0),
        residual=config.number("scale_depth", depth**0.5) / depth**0.5,
        logits=config.size("dim_model_base", hidden) / hidden,
    )
