"""Jamba: Mamba, attention in every few layers, and experts in every other one. Source: arXiv
2403.19887.
"""

from __future__ import annotations

from typing import Any

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.bamba import NAMES
from jaxkv.models.families.base import Layout, read_decoder
from jaxkv.models.families.experts import MAX_EXPERTS, Experts, read_router
from jaxkv.models.families.hybrid import with_mixer
from jaxkv.models.families.ssm import mamba_leaves, read_mamba
from jaxkv.models.spec import ModelSpec


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    num_layers = config.num_layers
    full = _every(config, "attn_layer", num_layers)
    hidden = config.size("hidden_size")
    mixer = read_mamba(
        config,
        channels=config.size("mamba_expand", 2) * hidden,
        norm_eps=config.number("rms_norm_eps", 1e-6),
    )
    mixture: dict[str, Any] = {}
    count = config.size("num_experts", 1, at_most=MAX_EXPERTS)
    routed = _every(config, "expert_layer", num_layers) if count > 1 else []
    if routed:
        experts = Experts(
            count=count,
            width=config.size("intermediate_size"),
            router="feed_forward.router",
            one="feed_forward.experts.{expert}.",
        )
        mixture = {
            "experts": experts.leaves,
            "is_dense": [layer for layer in range(num_layers) if layer not in routed],
            "router": read_router(config, count, used="num_experts_per_tok"),
        }
    read = read_decoder(config, names=NAMES, ropes=[None] * num_layers, **mixture)
    layers = [layer for layer in range(num_layers) if layer not in full]
    leaves = mamba_leaves(
        mixer,
        f"{NAMES.layer}mamba.",
        hidden,
        has_norms=True,
        has_conv_bias=config.flag("mamba_conv_bias", True),
        has_biases=config.flag("mamba_proj_bias", False),
    )
    return with_mixer(read, layers, mixer, leaves)


def _every(config: ConfigReader, key: str, num_layers: int) -> list[int]:
    """Lists the layers of a period, from its offset on."""
    period = config.size(f"{key}_period")
    offset = config.size(f"{key}_offset", 0, at_least=0, at_most=period - 1)
    return list(range(offset, num_layers, period))
