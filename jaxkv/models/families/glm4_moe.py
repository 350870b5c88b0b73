"""GLM-4.5: partly rotated heads, with the experts of DeepSeek V3. Source: arXiv 2508.06471."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import QK_NORMED, QKV, Layout, Names, read_decoder
from jaxkv.models.families.experts import first_dense, read_grouped
from jaxkv.models.spec import ModelSpec


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    return read_glm4_moe(config)


def read_glm4_moe(
    config: ConfigReader, *, names: Names = QK_NORMED, **more: Any
) -> tuple[ModelSpec, Layout]:
    """Reads GLM-4.5, or a family that is it by other names. more: what `Experts` has else."""
    experts, router = read_grouped(config)
    has_norms = config.flag("use_qk_norm", False)
    return read_decoder(
        config,
        names=names if has_norms else replace(names, q_norm=None, k_norm=None),
        biased=QKV * config.flag("attention_bias", False),
        partly=True,
        experts=replace(experts, **more).leaves,
        is_dense=first_dense(config),
        router=router,
    )
