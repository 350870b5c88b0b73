"""MiniCPM 1 and 2: Llama with factors on embeddings, what joins the stream and logits. Source:
arXiv 2404.06395, appendix A.1.
"""

from __future__ import annotations

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import Layout, read_decoder
from jaxkv.models.spec import ModelSpec, Scales


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    config.refuse("num_experts", 0)
    hidden, depth = config.size("hidden_size"), config.size("num_hidden_layers")
    return read_decoder(
        config,
        family="minicpm",
        scales=Scales(
            embed=config.number("scale_emb", 1.0),
            residual=config.number("scale_depth", 1.0) / depth**0.5,
            logits=config.size("dim_model_base", 1) / hidden,
        ),
    )
