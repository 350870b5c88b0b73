"""Mamba: layers of a selective state space each. Source: arXiv 2312.00752."""

from __future__ import annotations

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import Layout
from jaxkv.models.families.ssm import ONLY, mamba_leaves, read_mamba, read_only_mixers
from jaxkv.models.spec import ModelSpec

RENAMED = {
    "mamba_d_conv": "conv_kernel",
    "mamba_d_state": "state_size",
    "mamba_dt_rank": "time_step_rank",
}


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    return read_mamba_model(config, norm_eps=None)


def read_mamba_model(config: ConfigReader, *, norm_eps: float | None) -> tuple[ModelSpec, Layout]:
    """Reads a model of nothing but Mamba. norm_eps: as in `Mamba`."""
    hidden = config.size("hidden_size")
    mixer = read_mamba(
        config.renamed(**RENAMED),
        channels=config.size("intermediate_size", config.size("expand", 2) * hidden),
        norm_eps=norm_eps,
    )
    leaves = mamba_leaves(
        mixer,
        f"{ONLY.layer}mixer.",
        hidden,
        has_conv_bias=config.flag("use_conv_bias", True),
        has_biases=config.flag("use_bias", False),
    )
    return read_only_mixers(config, mixer, leaves)
