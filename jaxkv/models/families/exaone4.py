"""EXAONE 4: norms behind attention and MLP; where layers have windows, the others rotate nothing.
Source: arXiv 2507.11407.
"""

from __future__ import annotations

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import FULL, POST_NORMED, SLIDING, Layout, read_decoder, read_kinds
from jaxkv.models.rope_config import read_rope
from jaxkv.models.spec import ModelSpec, RopeSpec


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    kinds, ropes = read_kinds_and_ropes(config)
    return read_decoder(config, names=POST_NORMED, kinds=kinds, ropes=ropes)


def read_kinds_and_ropes(config: ConfigReader) -> tuple[list[str], list[RopeSpec | None]]:
    """Reads of each layer whether it has a window, and its rotary embedding, if it has one."""
    num_layers = config.num_layers
    rope = read_rope(config)
    kinds = [FULL] * num_layers
    ropes: list[RopeSpec | None] = [rope] * num_layers
    if config.get("sliding_window") is not None:
        config.size("sliding_window")
        kinds = _kinds(config, num_layers)
        ropes = [rope if kind == SLIDING else None for kind in kinds]
    return kinds, ropes


def _kinds(config: ConfigReader, num_layers: int) -> list[str]:
    """Reads each layer's kind; a pattern may be a number, or a text such as "LLLG"."""
    if config.get("layer_types") is not None:  # a pattern beside it counts for nothing
        return read_kinds(config)
    pattern = config.get("sliding_window_pattern", 4)
    if not isinstance(pattern, str):
        every = config.size("sliding_window_pattern", 4)
        return read_kinds(config, every=every)
    if not pattern or set(pattern) - {"L", "G"}:
        raise config.fail("sliding_window_pattern", "a number or a text of L and G")
    turns = [SLIDING if one == "L" else FULL for one in pattern]
    kinds = [turns[layer % len(turns)] for layer in range(num_layers)]
    return [*kinds[:-1], FULL]
