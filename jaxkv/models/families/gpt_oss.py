"""gpt-oss: windows in every other layer, attention sinks, experts with biases and bounded gates.
Source: arXiv 2508.10925.
"""

from __future__ import annotations

from dataclasses import replace

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import (
    LAYER,
    Layout,
    Leaf,
    Part,
    attn_biased,
    leaf,
    read_decoder,
    read_kinds,
)
from jaxkv.models.families.experts import MAX_EXPERTS, Experts, read_router
from jaxkv.models.spec import AttentionSpec, ModelSpec
from jaxkv.ops.layers import CLAMPED


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    refuse_other_gates(config)
    count = config.size("num_local_experts", at_most=MAX_EXPERTS)
    width, hidden = config.size("intermediate_size"), config.size("hidden_size")
    spec, layout = read_decoder(
        config,
        biased=attn_biased(config, default=True),
        kinds=read_kinds(config, every=2),
        attention=AttentionSpec(has_sinks=True),
        experts=Experts(count=count, width=width, router="mlp.router").leaves,
        router=read_router(config, count, used="num_experts_per_tok", of_chosen=True),
    )
    own = _experts(count, width, hidden)
    sinks = leaf(f"{LAYER}self_attn.sinks", (spec.num_heads,), ("heads",))
    offset = leaf(f"{LAYER}mlp.router.bias", (count,), ("experts",))
    layout = layout.in_each_layer(**own, sinks=sinks, router_offset=offset)
    return replace(spec, activation=CLAMPED), layout


def refuse_other_gates(config: ConfigReader) -> None:
    """Raises: CheckpointError for bounds of gates, or a factor in them, other than gpt-oss's."""
    for key, value in (("swiglu_limit", 7.0), ("swiglu_alpha", 1.702)):
        if config.number(key, value) != value:
            raise config.fail(key, f"{value} (nothing else is built)")


def _experts(count: int, width: int, hidden: int) -> dict[str, Leaf]:
    """Describes what all experts have in one tensor each: [E, in, out], with a gate's columns and
    those of the other map taking turns.
    """
    leaves: dict[str, Leaf] = {}

    def add(name: str, source: str, shape: tuple[int, int], *, turn: int | None) -> None:
        num_blocks = 1 if turn is None else count * width
        place = (num_blocks, turn or 0, None if turn is None else turn + 1)
        num_rows = shape[0] if turn is None else 2 * width
        of_weight = Part((count, shape[1], num_rows), *place, transposed=True, of_all=True)
        of_bias = Part((count, num_rows), *place, of_all=True)
        axes = ("model", "ffn") if turn is None else ("ffn", "model")
        full = f"{LAYER}mlp.experts.{source}"
        leaves[f"expert_{name}"] = leaf(full, shape, axes, part=of_weight, num_experts=count)
        leaves[f"expert_{name}_bias"] = leaf(
            f"{full}_bias", shape[:1], axes[:1], part=of_bias, num_experts=count
        )

    add("gate", "gate_up_proj", (width, hidden), turn=0)
    add("up", "gate_up_proj", (width, hidden), turn=1)
    add("down", "down_proj", (hidden, width), turn=None)
    return leaves
