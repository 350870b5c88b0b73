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
    every, first = config.size("index_topk_freq", 1), config.size("index_skip_topk_offset", 2)
    otherwise = [x for x in range(found[0].num_layers) if max(x - first + 1, 0) % every]
    return with_shared(found, config, otherwise)


def with_shared(
    found: tuple[ModelSpec, Layout], config: ConfigReader, otherwise: list[int]
) -> tuple[ModelSpec, Layout]:
    """Returns a decoder of which some layers have no index heads: those that the config lists as
    shared, or `otherwise`.
    """
    if not (shared := _shared_layers(config, otherwise)):
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


def _shared_layers(config: ConfigReader, otherwise: list[int]) -> list[int]:
    num_layers = config.size("num_hidden_layers", at_most=MAX_LAYERS)
    key = next((x for x in ("indexer_types", "index_topk_pattern") if config.get(x)), None)
    if key is None:
        return otherwise
    if isinstance(config.get(key), str):
        config = config.replaced(**{key: list(config.get(key))})
    kinds = config.kinds(key, num_layers, ("full", "shared", "F", "S"))
    shared = [layer for layer, kind in enumerate(kinds) if kind in ("shared", "S")]
    if 0 in shared:
        raise config.fail(key, "a first layer that is full: there is none before it to share with")
    return shared
