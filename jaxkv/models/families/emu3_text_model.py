"""The text part of Emu3: Llama. Source: arXiv 2409.18869."""

from __future__ import annotations

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families import llama
from jaxkv.models.families.base import Layout
from jaxkv.models.spec import ModelSpec


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    return llama.read(config, family="emu3_text_model")
