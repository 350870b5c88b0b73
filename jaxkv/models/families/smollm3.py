"""SmolLM3: Llama of which every fourth layer rotates nothing. Source: arXiv 2501.18795 (layers
without rope).
"""

from __future__ import annotations

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import FULL, SLIDING, Layout, attn_biased, mlp_biased, read_decoder
from jaxkv.models.rope_config import read_rope
from jaxkv.models.spec import ModelSpec


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    num_layers = config.num_layers
    biased = attn_biased(config) + mlp_biased(config)
    rope = read_rope(config)
    rotates = read_rotates(config, num_layers)
    kinds = None
    if config.get("layer_types") is not None:
        kinds = config.kinds("layer_types", num_layers, (FULL, SLIDING))
    elif config.flag("use_sliding_window", False) and config.get("sliding_window"):
        kinds = [FULL if one else SLIDING for one in rotates]
    return read_decoder(
        config,
        biased=biased,
        kinds=kinds,
        ropes=[rope if one else None for one in rotates],
    )


def read_rotates(config: ConfigReader, num_layers: int) -> list[bool]:
    """Reads `no_rope_layers`, which has 1 for layers that do rotate."""
    given = config.get("no_rope_layers")
    if given is None:
        every = config.size("no_rope_layer_interval", 4)
        return [(layer + 1) % every != 0 for layer in range(num_layers)]
    if len(config.whole_numbers("no_rope_layers", at_least=0, at_most=1)) != num_layers:
        raise config.fail("no_rope_layers", f"a list of {num_layers} out of 0 and 1")
    return [bool(one) for one in given]
