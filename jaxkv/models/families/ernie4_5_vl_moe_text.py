"""The text part of ERNIE 4.5 VL: ERNIE 4.5 MoE. Experts for images follow those for text under the
same names, and their router and bias lie beside those for text; none of them is loaded. Source:
ERNIE 4.5 technical report (Baidu, 2025).
"""

from __future__ import annotations

from dataclasses import replace

from jaxkv.config import is_int
from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families import ernie4_5_moe
from jaxkv.models.families.base import Layout
from jaxkv.models.families.experts import listed_dense
from jaxkv.models.spec import ModelSpec

ROUTER_OF_IMAGES = r"model\.layers\.\d+\.mlp\.gate\.weight_1"
EXPERTS_OF_IMAGES = r"model\.layers\.\d+\.mlp\.experts\.(%s)\..*"


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    widths = config.get("moe_intermediate_size", [1536, 512])
    if not isinstance(widths, list) or len(widths) != 2 or not all(map(is_int, widths)):
        raise config.fail("moe_intermediate_size", "two sizes: of experts for text and for images")
    config = config.replaced(moe_intermediate_size=widths[0])
    experts = ernie4_5_moe.read_experts(config)
    experts = replace(experts, router_transposed=True, bias_shape=(2, experts.count))
    is_dense = listed_dense(config, otherwise=[0])
    spec, layout = ernie4_5_moe.read_with(config, experts, is_dense)
    numbers = "|".join(map(str, range(experts.count, 2 * experts.count)))
    return spec, layout.with_unread(ROUTER_OF_IMAGES, EXPERTS_OF_IMAGES % numbers)
