"""The text part of ERNIE 4.5 VL: ERNIE 4.5 MoE. Experts for images follow those for text under the
same names, and their router and bias lie beside those for text; none of them is loaded. Source:
ERNIE 4.5 technical report (Baidu, 2025).
"""

from __future__ import annotations

from dataclasses import replace

from jaxkv.config import is_int
from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import Layout, Part, read_decoder
from jaxkv.models.families.experts import MAX_EXPERTS, Experts, listed_dense, read_router
from jaxkv.models.spec import ModelSpec

OF_IMAGES = r"model\.layers\.\d+\.mlp\.gate\.weight_1"


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    count = config.size("moe_num_experts", at_most=MAX_EXPERTS)
    widths = config.get("moe_intermediate_size", [1536, 512])
    if not isinstance(widths, list) or len(widths) != 2 or not all(map(is_int, widths)):
        raise config.fail("moe_intermediate_size", "two sizes: of experts for text and for images")
    width = config.replaced(moe_intermediate_size=widths[0]).size("moe_intermediate_size")
    num_shared = (
        config.size("moe_num_shared_experts") if config.get("moe_num_shared_experts") else 0
    )
    experts = Experts(
        count=count,
        width=width,
        bias="mlp.moe_statics.e_score_correction_bias",
        shared="mlp.shared_experts.",
        shared_width=num_shared * width,
    )
    if config.flag("use_bias", False):
        raise config.fail("use_bias", "false (biases of experts are not built)")
    spec, layout = read_decoder(
        config,
        family="ernie4_5_vl_moe_text",
        interleaved=True,
        experts=experts.leaves,
        is_dense=listed_dense(config, otherwise=[0]),
        router=read_router(config, count, used="moe_k", is_normalised=True),
    )
    parts = {
        "router": Part(shape=(spec.hidden_size, count), transposed=True),
        "router_bias": Part(shape=(2, count), of_all=True, stop=count),
    }
    layers = tuple(
        {
            name: replace(leaf, part=parts[name]) if name in parts else leaf
            for name, leaf in layer.items()
        }
        for layer in layout.layers
    )
    return spec, replace(layout, layers=layers, derived=(*layout.derived, OF_IMAGES))
