"""Muse Glimmer: gated attention that rotates within windows only, norms on both sides with an eps
for each side, queries and keys without weights of a norm. Source: the model's card,
meta-models/Muse-Glimmer-30B.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import (
    FULL,
    LAYER,
    SANDWICH,
    SLIDING,
    Layout,
    Names,
    attn_biased,
    leaf,
    read_decoder,
)
from jaxkv.models.rope_config import read_rope
from jaxkv.models.spec import AttentionSpec, ModelSpec, OwnNorm, RopeSpec, Scales

BEHIND = ("post_attn_norm", "post_mlp_norm")
"""Norms behind the blocks of a layer."""


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    behind = OwnNorm(eps=config.number("post_norm_eps", 1e-8))
    return read_muse(
        config, SANDWICH, dict.fromkeys(BEHIND, behind), activation="hidden_activation"
    )


def read_muse(
    config: ConfigReader,
    names: Names,
    norms: Mapping[str, OwnNorm],
    unit_norms: tuple[str, ...] = (),
    *,
    join_temperature: float = 1.0,
    **spec: Any,
) -> tuple[ModelSpec, Layout]:
    """Reads what both Muse models have. norms, unit_norms: those of one of them.
    join_temperature: as in `Scales`. spec: as in `read_decoder`.
    """
    num_layers = config.num_layers
    full = [(num_layers - 1 - i) % 4 == 0 for i in range(num_layers)]
    otherwise = [FULL if one else SLIDING for one in full]
    found, layout = read_decoder(
        config,
        names=names,
        biased=attn_biased(config),
        kinds=config.kinds("layer_types", num_layers, (FULL, SLIDING), otherwise),
        ropes=_ropes(config, full),
        norm="rms_one",
        unit_norms=("embed_norm", "q_norm", "k_norm", *unit_norms),
        scales=Scales(
            join_temperature=join_temperature,
            logits=config.number("output_multiplier"),
            logit_cap=config.number("final_logit_softcapping"),
            norms=(("norm", OwnNorm(is_plain=True)), *norms.items()),
        ),
        attention=AttentionSpec(scale=config.number("qk_scale_factor") * config.head_dim**-0.5),
        **spec,
    )
    rows = found.num_heads * found.head_dim
    source = f"{LAYER}self_attn.gate_proj.weight"
    gate = leaf(source, (rows, found.hidden_size), ("heads", "model"))
    return found, layout.in_each_layer(attn_gate=gate)


def _ropes(config: ConfigReader, full: list[bool]) -> list[RopeSpec | None]:
    """Reads each layer's rotation: none where `layer_rope_theta` is 0, and without that list in
    each fourth layer, the last one among them.

    Raises: CheckpointError for another theta than that of all layers, which transformers takes for
    that one.
    """
    key, rope = "layer_rope_theta", read_rope(config)
    thetas = config.get(key, [0 if one else rope.theta for one in full])
    if (
        not isinstance(thetas, list)
        or len(thetas) != len(full)
        or not all(one in (0, rope.theta) for one in thetas)
    ):
        expected = f"for each of the {len(full)} layers 0 or rope_theta={rope.theta:g}"
        raise config.fail(key, f"{expected} (nothing else is built)")
    return [rope if one else None for one in thetas]
