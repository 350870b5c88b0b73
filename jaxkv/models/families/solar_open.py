"""Solar Open: Llama with the experts of DeepSeek V3 in every layer. Source: arXiv 2601.07022."""

from __future__ import annotations

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import QKV, Layout, read_decoder
from jaxkv.models.families.experts import read_grouped
from jaxkv.models.spec import ModelSpec


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    experts, router = read_grouped(config)
    return read_decoder(
        # No layer has an MLP for all tokens, and not every file says how wide it would be.
        config.with_defaults({"intermediate_size": experts.width}),
        biased=QKV * config.flag("attention_bias", False),
        experts=experts.leaves,
        router=router,
    )
