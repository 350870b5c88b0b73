"""ERNIE 4.5 MoE: ERNIE 4.5 with experts and shared ones. Source: ERNIE 4.5 technical report
(Baidu, 2025).
"""

from __future__ import annotations

from jaxkv.config import is_int
from jaxkv.models.config_reader import MAX_LAYERS, ConfigReader
from jaxkv.models.families.base import Layout, read_decoder
from jaxkv.models.families.experts import MAX_EXPERTS, Experts, first_dense, read_router
from jaxkv.models.spec import ModelSpec


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    count = config.size("moe_num_experts", at_most=MAX_EXPERTS)
    width = config.size("moe_intermediate_size")
    num_layers = config.size("num_hidden_layers", at_most=MAX_LAYERS)
    num_shared = (
        config.size("moe_num_shared_experts") if config.get("moe_num_shared_experts") else 0
    )
    experts = Experts(
        count=count,
        width=width,
        bias="mlp.moe_statics.e_score_correction_bias",
        bias_shape=(1, count),
        shared="mlp.shared_experts.",
        shared_width=num_shared * width,
    )
    start = len(first_dense(config, "moe_layer_start_index"))
    step = config.size("moe_layer_interval", 1)
    last = config.get("moe_layer_end_index", -1)
    end = num_layers - 1 if last == -1 else last
    if not is_int(end):
        raise config.fail("moe_layer_end_index", "a layer, or -1 for the last")
    if config.flag("use_bias", False):
        raise config.fail("use_bias", "false (biases of experts are not built)")
    return read_decoder(
        config,
        family="ernie4_5_moe",
        interleaved=True,
        experts=experts.leaves,
        is_dense=[i for i in range(num_layers) if not start <= i <= end or (i + 1) % step],
        router=read_router(config, count, used="moe_k", is_normalised=True),
    )
