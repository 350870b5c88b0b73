"""Mamba2: layers of a state space each. Source: arXiv 2405.21060."""

from __future__ import annotations

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import Layout
from jaxkv.models.families.ssm import ONLY, mamba2_leaves, read_mamba2, read_only_mixers
from jaxkv.models.spec import ModelSpec

RENAMED = {
    "mamba_n_heads": "num_heads",
    "mamba_d_head": "head_dim",
    "mamba_n_groups": "n_groups",
    "mamba_d_state": "state_size",
    "mamba_d_conv": "conv_kernel",
}


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    hidden, has_biases = config.size("hidden_size"), config.flag("use_bias", False)
    mixer = read_mamba2(
        config.renamed(**RENAMED),
        inner=config.size("expand", 2) * hidden,
        norm_eps=config.number("layer_norm_epsilon", 1e-5),
        activation=config.choice("hidden_act", "silu", ("silu",)),
    )
    leaves = mamba2_leaves(
        mixer,
        f"{ONLY.layer}mixer.",
        hidden,
        has_conv_bias=config.flag("use_conv_bias", True),
        has_in_bias=has_biases,
        has_out_bias=has_biases,
    )
    return read_only_mixers(config, mixer, leaves)
