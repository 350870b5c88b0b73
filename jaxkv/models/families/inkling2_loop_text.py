"""The text part of Inkling 2 Mini: Inkling 2 with layers in the middle that run more than once, and
get messages of their last time. Source: the model's card, thinkingmachines/Inkling-2-Mini, as
transformers has it.
"""

from __future__ import annotations

from dataclasses import replace

from jaxkv.models.config_reader import MAX_LAYERS, ConfigReader
from jaxkv.models.depth import GATE, KV_MESSAGES, MESSAGES
from jaxkv.models.families.base import LAYER, Layout, Leaf, Part, leaf
from jaxkv.models.families.inkling2_text import read_over
from jaxkv.models.spec import DepthSpec, ModelSpec

PUBLISHED = {
    "core_start": "loop_layer_index_start",
    "core_end": "loop_layer_index_end",
    "num_passes": "loop_num_passes",
    "gate_rank": "loop_gate_rank",
}
"""Keys of a section of published configs, and those that transformers has beside all others."""

CONTROLLERS = {"q": "attn", "k": "k", "v": "v", "mlp": "mlp"}
"""Names in published files of what messages are to."""


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    if config.get("loop_config") is not None:  # it is before what is beside it
        section = config.section("loop_config")
        given = {new: section.get(old) for old, new in PUBLISHED.items()}
        config = config.replaced(**{key: x for key, x in given.items() if x is not None})
    size = config.size("n_layers_per_attn_res_block")
    start, stop = (
        config.size(key, at_most=config.num_layers)
        for key in ("loop_layer_index_start", "loop_layer_index_end")
    )
    for key, end in (("loop_layer_index_start", start), ("loop_layer_index_end", stop)):
        if end % size:
            raise config.fail(key, f"a multiple of n_layers_per_attn_res_block={size}")
    if stop <= start:
        raise config.fail("loop_layer_index_end", f"more than loop_layer_index_start={start}")
    num_times = config.size("loop_num_passes", at_most=MAX_LAYERS)
    if config.num_layers + (stop - start) * (num_times - 1) > MAX_LAYERS:
        raise config.fail("loop_num_passes", f"at most {MAX_LAYERS} layers in all passes")
    asked = DepthSpec(size=size, start=start, stop=stop, num_times=num_times)
    spec, layout = read_over(config, asked)
    hidden = spec.hidden_size
    again = {kind for layer, kind in enumerate(spec.layer_kinds) if layer in asked.again}
    gates = _gates(config.size("loop_gate_rank"), hidden)
    layers = tuple(
        {**one, **gates} if kind in again else one for kind, one in enumerate(layout.layers)
    )
    count = 2 * len(asked.again)
    part = Part(shape=(count, hidden))
    queries = {
        name: leaf(f"model.middle_cycle_cross_pass_{end}", (count * hidden,), (None,), part=part)
        for name, end in ((MESSAGES, "queries"), (KV_MESSAGES, "kv_queries"))
    }
    return spec, replace(layout, layers=layers).with_top(**queries)


def _gates(rank: int, hidden: int) -> dict[str, Leaf]:
    """Describes what lets messages into what blocks take."""
    shapes = {"down": (rank, 2 * hidden), "forget": (hidden, rank), "gain": (hidden, rank)}
    return {
        f"{name}{GATE}{end}": leaf(f"{LAYER}controllers.{own}.{end}_weight", shape, (None, None))
        for name, own in CONTROLLERS.items()
        for end, shape in shapes.items()
    }
