"""Qwen3-Next: Gated DeltaNet in three of four layers, gated attention in the others, and experts.
Source: the model's card, Qwen/Qwen3-Next-80B-A3B-Instruct.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from jaxkv.models.config_reader import MAX_LAYERS, ConfigReader
from jaxkv.models.families.base import (
    LAYER,
    QK_NORMED,
    Layout,
    Leaf,
    Names,
    attn_biased,
    read_decoder,
)
from jaxkv.models.families.delta import (
    CONV_ACTIVATIONS,
    MIXED,
    matrices_of,
    read_gated_delta,
    read_linear_layers,
    rest_of,
    with_gates,
)
from jaxkv.models.families.experts import MAX_EXPERTS, Experts, qwen_dense, read_router
from jaxkv.models.families.hybrid import with_mixer
from jaxkv.models.recurrent import GatedDelta
from jaxkv.models.spec import ModelSpec

PREFIX = f"{LAYER}linear_attn."

PREDICTORS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")

Matrices = Callable[[GatedDelta, int], Mapping[str, Leaf]]
"""Describes the matrices of a mixer in a stream of this width."""


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    return read_qwen_hybrid(
        config,
        matrices=_matrices,
        is_normalised=config.flag("norm_topk_prob", True),
        is_dense=qwen_dense(config),
    )


def _matrices(mixer: GatedDelta, hidden: int) -> Mapping[str, Leaf]:
    first, second = f"{PREFIX}in_proj_qkvz", f"{PREFIX}in_proj_ba"
    wide = matrices_of(mixer, first, (*MIXED, "delta_gate"), hidden, by_key_head=True)
    return wide | matrices_of(mixer, second, ("delta_b", "delta_step"), hidden, by_key_head=True)


def read_qwen_hybrid(
    config: ConfigReader,
    *,
    matrices: Matrices,
    is_normalised: bool = True,
    is_dense: Collection[int] | None,
    names: Names = QK_NORMED,
    gate: str = "silu",
    **spec: Any,
) -> tuple[ModelSpec, Layout]:
    """Reads a decoder of layers with Gated DeltaNet or gated attention, and experts but in those of
    `is_dense`, which is None of a model without any. gate: the activation of gates of the former.
    spec: as in `read_decoder`.
    """
    layers = read_linear_layers(config, every=config.size("full_attention_interval", 4))
    mixer = read_gated_delta(config, norm_eps=config.number("rms_norm_eps", 1e-6))
    mixer = replace(mixer, gate=gate)
    experts, router = None, None
    if is_dense is not None:
        count = config.size("num_experts", at_most=MAX_EXPERTS)
        experts = Experts(
            count=count,
            width=config.size("moe_intermediate_size"),
            shared="mlp.shared_expert.",
            shared_width=config.size("shared_expert_intermediate_size"),
            shared_gate="mlp.shared_expert_gate",
        ).leaves
        router = read_router(config, count, used="num_experts_per_tok", is_normalised=is_normalised)
    read = read_decoder(
        config,
        names=names,
        biased=attn_biased(config),
        partly=True,
        norm="rms_one",
        activations=CONV_ACTIVATIONS,
        experts=experts,
        is_dense=is_dense or (),
        router=router,
        **spec,
    )
    hidden = read[0].hidden_size
    rest = rest_of(mixer, PREFIX, hidden, conv="conv1d", norm="norm", out="out_proj")
    leaves = {**matrices(mixer, hidden), **rest}
    found, layout = with_mixer(with_gates(read), layers, mixer, leaves)
    return found, replace(layout, num_predictors=_num_predictors(config))


def _num_predictors(config: ConfigReader) -> int:
    """Counts the layers that predict later tokens: one, of which Qwen3-Next's config.json says
    nothing.
    """
    given = [key for key in PREDICTORS if config.get(key) is not None]
    if not given:
        return 1
    return config.size(given[0], at_least=0, at_most=MAX_LAYERS)
