"""The text part of Qwen3.5 (dense): Qwen3-Next's layers with an MLP. Source: the model's card,
Qwen/Qwen3.5-27B.
"""

from __future__ import annotations

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import Layout, Leaf
from jaxkv.models.families.delta import MIXED, matrices_of
from jaxkv.models.families.qwen3_next import PREFIX, read_qwen_hybrid
from jaxkv.models.recurrent import GatedDelta
from jaxkv.models.spec import ModelSpec


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    return read_qwen_hybrid(config, matrices=in_turn, is_dense=None)


def in_turn(mixer: GatedDelta, hidden: int) -> dict[str, Leaf]:
    """Describes matrices of which some are stored one behind the other, the others apart."""
    stored = {"qkv": MIXED, "z": ("delta_gate",), "b": ("delta_b",), "a": ("delta_step",)}
    found: dict[str, Leaf] = {}
    for source, names in stored.items():
        found |= matrices_of(mixer, f"{PREFIX}in_proj_{source}", names, hidden)
    return found
