"""HRM-Text: two stacks of layers that run by turns, the one several times for each time of the
other, on the sum of what both gave last. Source: the model's card, sapientinc/HRM-Text-1B.

Its instructions may see what is behind them, for which transformers asks for token types; without
these it is causal as here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from jaxkv.models.config_reader import MAX_LAYERS, ConfigReader
from jaxkv.models.families.base import (
    Layout,
    Leaf,
    Names,
    attn_biased,
    leaf,
    mlp_biased,
    read_decoder,
)
from jaxkv.models.families.hybrid import rows_of
from jaxkv.models.spec import ModelSpec, Pass, Scales

LOW, HIGH = "model.L_module.layers.{layer}.", "model.H_module.layers.{layer}."
KEPT_LOW, KEPT_HIGH = 0, 1
NAMES = Names(
    layer=LOW,
    norm=None,
    attn_norm=None,
    mlp_norm=None,
    o="attn.o_proj",
    gate_up=None,
)
FUSED = ("attn_gate", "q", "k", "v")


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    heads = config.size("num_attention_heads")
    high = config.size("H_cycles", 2, at_most=MAX_LAYERS)
    low = config.size("L_cycles", 3, at_most=MAX_LAYERS)
    # A config that transformers has written counts each time through in the other key.
    count = config.size("num_layers_per_stack", config.num_layers, at_most=MAX_LAYERS)
    num_passes = high * (low + 1)
    if count * num_passes > MAX_LAYERS:
        raise config.fail("H_cycles", f"at most {MAX_LAYERS} layers, each time through counted")
    embed = config.get("embedding_scale")
    embed = 1 / config.number("initializer_range", 0.02) if embed is None else embed
    spec, layout = read_decoder(
        config.replaced(num_hidden_layers=count * num_passes, num_key_value_heads=heads),
        names=NAMES,
        biased=(*attn_biased(config), *mlp_biased(config)),
        unit_norms=("attn_norm", "mlp_norm", "norm"),
        scales=Scales(
            embed=config.replaced(embedding_scale=embed).number("embedding_scale"),
            passes=_passes(count, high, low),
        ),
    )
    (leaves,) = layout.layers
    low_leaves = {**leaves, **_fused(leaves, spec.hidden_size)}
    high_leaves = {
        name: replace(one, source=one.source.replace(LOW, HIGH)) for name, one in low_leaves.items()
    }
    kinds = ((0,) * low + (1,)) * high
    spec = replace(spec, layer_kinds=tuple(kind for kind in kinds for _ in range(count)))
    numbers = tuple(range(count)) * num_passes
    init = leaf("model.z_L_init", (spec.hidden_size,), ("model",))
    layout = replace(layout, layers=(low_leaves, high_leaves), numbers=numbers)
    return spec, layout.with_top(kept_init=init)


def _passes(count: int, high: int, low: int) -> tuple[Pass, ...]:
    """Says what comes into each time through a stack: the sum of what each of both gave last."""
    found = []
    for i in range(high * (low + 1)):
        follows_high = i % (low + 1) == 0
        keeps, joins = (KEPT_HIGH, KEPT_LOW) if follows_high else (KEPT_LOW, KEPT_HIGH)
        found.append(Pass(layer=i * count, joins=joins, keeps=keeps, is_normed=i > 0))
    return tuple(found)


def _fused(leaves: Mapping[str, Leaf], hidden: int) -> dict[str, Leaf]:
    """Describes matrices that checkpoints have as one, and the biases beside these."""
    size = leaves["q"].info.shape[0]
    axes = {"attn_gate": "heads", "q": "heads", "k": "kv_heads", "v": "kv_heads"}
    sizes = dict.fromkeys(FUSED, size)
    found = rows_of(f"{LOW}attn.gqkv_proj.weight", sizes, hidden, axes)
    both, ffn = ("gate", "up"), leaves["gate"].info.shape[0]
    sizes, of_ffn = dict.fromkeys(both, ffn), dict.fromkeys(both, "ffn")
    found |= rows_of(f"{LOW}mlp.gate_up_proj.weight", sizes, hidden, of_ffn)
    if "q_bias" in leaves:
        source = f"{LOW}self_attn.gate_proj.bias"
        found["attn_gate_bias"] = leaf(source, (size,), ("heads",))
    return found
