"""Command A+: Command A with experts. Source: transformers' Cohere2Moe."""

from __future__ import annotations

from dataclasses import replace

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import FULL, SLIDING, Layout, Names, attn_biased, read_decoder
from jaxkv.models.families.experts import (
    MAX_EXPERTS,
    Experts,
    first_dense,
    listed_dense,
    read_router,
)
from jaxkv.models.rope_config import read_rope
from jaxkv.models.spec import ModelSpec, Scales
from jaxkv.ops.experts import Router


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    dense = listed_dense(config, first_dense(config))
    kinds = _kinds(config)
    # transformers writes `rope_scaling` beside what it computes with, and never reads it.
    rope = read_rope(config.replaced(rope_scaling=None), interleaved=True)
    # Dense layers in front that all see everything are rotated too.
    rotated = dense if config.size("prefix_dense_sliding_window_pattern", 1) == 1 else ()
    width = config.size("intermediate_size")
    experts, router = _read_experts(config, width)
    is_rms = config.get("rms_norm_eps") is not None
    return read_decoder(
        config.replaced(intermediate_size=config.size("prefix_dense_intermediate_size", width)),
        names=Names(mlp_norm=None),
        biased=attn_biased(config),
        kinds=kinds,
        ropes=[rope if kind == SLIDING or i in rotated else None for i, kind in enumerate(kinds)],
        eps="rms_norm_eps" if is_rms else "layer_norm_eps",
        norm="rms" if is_rms else "layer",
        is_parallel=True,
        scales=Scales(logits=config.number("logit_scale", 0.0625)),
        experts=experts.leaves,
        is_dense=dense,
        router=router,
    )


def _kinds(config: ConfigReader) -> list[str]:
    """Reads `layer_types`; without it a period for the dense layers in front, and one for the
    rest, whose last layers see everything.
    """
    num_layers = config.num_layers
    if config.get("layer_types") is not None:
        return config.kinds("layer_types", num_layers, (FULL, SLIDING))
    num_dense = len(first_dense(config))
    counts = {"prefix_dense_sliding_window_pattern": num_dense}
    counts["sliding_window_pattern"] = num_layers - num_dense
    kinds = []
    for key, count in counts.items():
        period = config.size(key, 4 if key == "sliding_window_pattern" else 1)
        kinds += [SLIDING if (i + 1) % period else FULL for i in range(count)]
    return kinds


def _read_experts(config: ConfigReader, width: int) -> tuple[Experts, Router]:
    count = config.size("num_experts", at_most=MAX_EXPERTS)
    score = config.choice("expert_selection_fn", "softmax", ("softmax", "sigmoid"))
    router = read_router(
        config,
        count,
        used="num_experts_per_tok",
        score=score,
        of_chosen=score == "softmax",
        is_normalised=score == "sigmoid" and config.flag("norm_topk_prob", True),
    )
    experts = Experts(count=count, width=width)
    if config.get("num_shared_experts") in (None, 0):
        return experts, router
    how = config.choice("shared_expert_combination_strategy", "average", ("average", "sum"))
    part = 0.5 if how == "average" else 1.0
    return (
        replace(
            experts,
            shared="mlp.shared_experts.",
            shared_width=config.size("num_shared_experts") * width,
        ),
        replace(router, scale=part, shared_scale=part),
    )
