"""GLM-5: DeepSeek V3.2 by other sizes, index heads rotated interleaved. From GLM-5.2 on most layers
have no index heads, and choose by those of a layer before them. Sources: the models' cards,
zai-org/GLM-5 and zai-org/GLM-5.2; arXiv 2603.12201.
"""

from __future__ import annotations

from dataclasses import replace

from jaxkv.models.config_reader import MAX_LAYERS, ConfigReader
from jaxkv.models.families.base import Layout
from jaxkv.models.families.deepseek_v32 import read_indexed
from jaxkv.models.families.hybrid import INDEX, with_leaves
from jaxkv.models.spec import ModelSpec


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    found = read_indexed(config, family="glm_moe_dsa", interleaved=True)
    if not (shared := _shared_layers(config)):
        return found
    own = {*INDEX, "index_k_norm_bias"}
    spec, layout = with_leaves(
        found, shared, lambda leaves: {x: y for x, y in leaves.items() if x not in own}
    )
    if spec.attention.index is None:
        raise ValueError("expected a decoder that chooses keys, got one that does not")
    index = replace(spec.attention.index, has_shared=True)
    spec = replace(spec, attention=replace(spec.attention, index=index))
    # Some conversions have the tensors nonetheless.
    unread = rf"model\.layers\.({'|'.join(map(str, shared))})\.self_attn\.indexer\..*"
    return spec, replace(layout, derived=(*layout.derived, unread))


def _shared_layers(config: ConfigReader) -> list[int]:
    """Lists the layers without index heads: those named so, or all but every so many."""
    num_layers = config.size("num_hidden_layers", at_most=MAX_LAYERS)
    key = next((x for x in ("indexer_types", "index_topk_pattern") if config.get(x)), None)
    if key is None:
        every, first = config.size("index_topk_freq", 1), config.size("index_skip_topk_offset", 2)
        return [layer for layer in range(num_layers) if max(layer - first + 1, 0) % every]
    if isinstance(config.get(key), str):
        config = config.replaced(**{key: list(config.get(key))})
    kinds = config.kinds(key, num_layers, ("full", "shared", "F", "S"))
    shared = [layer for layer, kind in enumerate(kinds) if kind in ("shared", "S")]
    if 0 in shared:
        raise config.fail(key, "a first layer that is full: there is none before it to share with")
    return shared
