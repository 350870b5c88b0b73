"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values. Source: arXiv 2407.10671."""

from __future__ import annotations

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import QKV, Layout, qwen_kinds, read_decoder
from jaxkv.models.spec import ModelSpec


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    return read_decoder(config, biased=QKV, kinds=qwen_kinds(config))
