"""The text part of PaddleOCR-VL: ERNIE 4.5 rotated in halves. Source: arXiv 2510.14528."""

from __future__ import annotations

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import MLP, QKV, Layout, read_decoder
from jaxkv.models.spec import ModelSpec


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    biased = (*QKV, "o", *MLP) * config.flag("use_bias", False)
    return read_decoder(config, biased=biased)
