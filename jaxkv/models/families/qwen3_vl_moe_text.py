"""The text part of Qwen3-VL with experts: Qwen3 MoE, as its rotary embedding is for text alone.
Source: arXiv 2511.21631.
"""

from __future__ import annotations

from dataclasses import replace

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families import qwen3_moe
from jaxkv.models.families.base import Layout
from jaxkv.models.spec import ModelSpec


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    experts = replace(
        qwen3_moe.read_experts(config),
        fused=("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
        either_way=True,  # as published [E, in, out], as transformers 5 writes them [E, out, in]
    )
    config.refuse("use_sliding_window", False)
    # No file says that the weights of the chosen experts are normalised, and they are.
    config = config.replaced(norm_topk_prob=True)
    return qwen3_moe.read(config, experts=experts)
