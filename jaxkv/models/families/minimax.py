"""MiniMax-Text-01: lightning attention, softmax attention in every few layers, and experts. Source:
arXiv 2501.08313.
"""

from __future__ import annotations

from dataclasses import replace

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import FULL, LAYER, Layout, Leaf, leaf, read_decoder
from jaxkv.models.families.delta import CHANNELS, LINEAR
from jaxkv.models.families.experts import read_mixtral, read_router
from jaxkv.models.families.hybrid import rows_of, with_mixer
from jaxkv.models.recurrent import Lightning
from jaxkv.models.spec import ModelSpec, NormedStream, Scales

DERIVED = r"model\.layers\.\d+\.self_attn\.(slope_rate|(query|key|diagonal)_decay)"
"""Tensors that follow from the sizes."""


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    num_layers = config.num_layers
    otherwise = [LINEAR if i % 2 else FULL for i in range(num_layers)]
    kinds = config.kinds("layer_types", num_layers, (FULL, LINEAR), otherwise)
    config.refuse("sliding_window")
    experts = read_mixtral(config)
    router = read_router(config, experts.count, used="num_experts_per_tok", is_normalised=True)
    read = read_decoder(config, experts=experts.leaves, router=router)
    spec = read[0]
    layers = tuple(layer for layer, kind in enumerate(kinds) if kind == LINEAR)
    mixer = Lightning(
        num_heads=spec.num_heads,
        head_dim=spec.head_dim,
        norm_eps=1e-6,
        activation=spec.activation,
        layers=layers,
        num_layers=num_layers,
    )
    spec, layout = with_mixer(read, layers, mixer, _leaves(mixer, spec.hidden_size))
    stream = NormedStream(
        mixer=tuple(_factors(config, f"{name}_attn") for name in _kinds_in_order(kinds)),
        mlp=_factors(config, "mlp"),
    )
    spec = replace(spec, scales=Scales(stream=stream))
    return spec, layout.with_unread(DERIVED)


def _kinds_in_order(kinds: list[str]) -> list[str]:
    """Lists the kinds of layers, each once, as configs spell them in the names of factors."""
    spelt = {FULL: "full", LINEAR: "linear"}
    return [spelt[kind] for kind in dict.fromkeys(kinds)]


def _factors(config: ConfigReader, name: str) -> tuple[float, float]:
    return (
        config.number(f"{name}_alpha_factor", 1.0),
        config.number(f"{name}_beta_factor", 1.0),
    )


def _leaves(mixer: Lightning, hidden: int) -> dict[str, Leaf]:
    """Describes the arrays of a layer's mixer."""
    prefix, inner = f"{LAYER}self_attn.", mixer.num_heads * mixer.head_dim
    names = ("light_q", "light_k", "light_v")
    sizes, axes = dict.fromkeys(names, inner), dict.fromkeys(names, CHANNELS)
    found = rows_of(f"{prefix}qkv_proj.weight", sizes, hidden, axes, num_blocks=mixer.num_heads)
    return found | {
        "light_norm": leaf(f"{prefix}norm.weight", (inner,), (CHANNELS,)),
        "light_gate": leaf(f"{prefix}output_gate.weight", (inner, hidden), (CHANNELS, "model")),
        "light_out": leaf(f"{prefix}out_proj.weight", (hidden, inner), ("model", CHANNELS)),
    }
