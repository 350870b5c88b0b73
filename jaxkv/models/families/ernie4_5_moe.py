"""ERNIE 4.5 MoE: ERNIE 4.5 with experts and shared ones. Source: ERNIE 4.5 technical report
(Baidu, 2025).
"""

from __future__ import annotations

from collections.abc import Collection

from jaxkv.config import is_int
from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import Layout, read_decoder
from jaxkv.models.families.experts import MAX_EXPERTS, Experts, first_dense, read_router
from jaxkv.models.spec import ModelSpec


def read_experts(config: ConfigReader) -> Experts:
    count = config.size("moe_num_experts", at_most=MAX_EXPERTS)
    width = config.size("moe_intermediate_size")
    return Experts(
        count=count,
        width=width,
        bias="mlp.moe_statics.e_score_correction_bias",
        bias_shape=(1, count),
        shared="mlp.shared_experts.",
        shared_width=config.size("moe_num_shared_experts", 0, at_least=0) * width,
    )


def read_dense(config: ConfigReader) -> list[int]:
    """Lists the layers without experts."""
    num_layers = config.num_layers
    start = len(first_dense(config, "moe_layer_start_index"))
    step = config.size("moe_layer_interval", 1)
    last = config.get("moe_layer_end_index", -1)
    end = num_layers - 1 if last == -1 else last
    if not is_int(end):
        raise config.fail("moe_layer_end_index", "a layer, or -1 for the last")
    return [i for i in range(num_layers) if not start <= i <= end or (i + 1) % step]


def read_with(
    config: ConfigReader, experts: Experts, is_dense: Collection[int]
) -> tuple[ModelSpec, Layout]:
    """Reads the decoder of these experts, which the layers of `is_dense` do not have."""
    if config.flag("use_bias", False):
        raise config.fail("use_bias", "false (biases of experts are not built)")
    # The least that weights are divided by, which no sum of them is below.
    config.refuse("moe_norm_min", 1e-12)
    return read_decoder(
        config,
        interleaved=True,
        experts=experts.leaves,
        is_dense=is_dense,
        router=read_router(config, experts.count, used="moe_k", is_normalised=True),
    )


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    return read_with(config, read_experts(config), read_dense(config))
