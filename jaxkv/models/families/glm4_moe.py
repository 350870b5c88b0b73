"""GLM-4.5: partly rotated heads, with the experts of DeepSeek V3. Source: arXiv 2508.06471."""

from __future__ import annotations

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import LLAMA, QK_NORMED, QKV, Layout, read_decoder
from jaxkv.models.families.experts import first_dense, read_grouped
from jaxkv.models.spec import ModelSpec


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    experts, router = read_grouped(config)
    return read_decoder(
        config,
        family="glm4_moe",
        names=QK_NORMED if config.flag("use_qk_norm", False) else LLAMA,
        biased=QKV * config.flag("attention_bias", False),
        partly=True,
        experts=experts.leaves,
        is_dense=first_dense(config),
        router=router,
    )
