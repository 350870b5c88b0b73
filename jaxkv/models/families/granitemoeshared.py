"""Granite MoE with an MLP for all tokens beside the experts. Source: arXiv 2408.13359 (the
factors).
"""

from __future__ import annotations

from dataclasses import replace

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families import granitemoe
from jaxkv.models.families.base import Layout
from jaxkv.models.families.experts import Experts
from jaxkv.models.spec import ModelSpec


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    experts = with_shared(config, granitemoe.read_experts(config))
    return granitemoe.read(config, experts=experts)


def with_shared(config: ConfigReader, experts: Experts) -> Experts:
    """Returns the experts with the MLP beside them, if the model has one."""
    return replace(
        experts,
        shared="shared_mlp.",
        shared_width=config.size("shared_intermediate_size", 0, at_least=0),
        shared_fused=("input_linear.weight", "output_linear.weight"),
    )
