"""Zamba: Mamba by heads, and in some layers a transformer block before it, whose weights all of
these share. Source: arXiv 2405.16712.
"""

from __future__ import annotations

from dataclasses import replace

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import Layout, Leaf, Part, leaf
from jaxkv.models.families.delta import CHANNELS
from jaxkv.models.families.ssm import mamba_leaves, read_mamba
from jaxkv.models.families.zamba2 import read_behind_blocks
from jaxkv.models.recurrent import Mamba
from jaxkv.models.spec import ModelSpec


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    hidden = config.size("hidden_size")
    config.choice("hidden_mamba_act", "silu", ("silu",))
    config.refuse("attention_hidden_size", 2 * hidden)
    config.refuse("attention_head_dim", 2 * hidden // config.size("num_attention_heads"))
    channels, heads = config.size("mamba_expand", 2) * hidden, config.size("n_mamba_heads", 2)
    if channels % heads:
        raise config.fail("n_mamba_heads", f"a divisor of the {channels} channels")
    mixer = read_mamba(config.replaced(hidden_act="silu"), channels=channels, norm_eps=None)
    return read_behind_blocks(
        config,
        "shared_transf.",
        mixer,
        lambda prefix: _by_head(config, mixer, prefix, heads),
        lambda leaves: {},
        num_shared=1,
        ropes=[None] * config.num_layers,
    )


def _by_head(config: ConfigReader, mixer: Mamba, prefix: str, heads: int) -> dict[str, Leaf]:
    """Describes the arrays of a mixer whose heads each make their own steps, and write and read
    their channels in their own way.
    """
    hidden, channels, states = config.size("hidden_size"), mixer.channels, mixer.state_dim
    size, rest = channels // heads, mixer.rank + 2 * states
    found = mamba_leaves(
        mixer,
        prefix,
        hidden,
        has_conv_bias=config.flag("mamba_conv_bias", True),
        has_biases=config.flag("mamba_proj_bias", False),
    )
    for name, one in found.items():
        if name.startswith(("scan_x", "scan_z")):  # of each channel two rows
            start = name.startswith("scan_z")
            shape = (2 * channels, *one.info.shape[1:])
            part = Part(shape=shape, num_blocks=channels, start=start, stop=start + 1)
            found[name] = replace(one, part=part)
    by_head = (CHANNELS, None, None)
    vector = Part(shape=(heads, size))
    return found | {
        "scan_rest": leaf(f"{prefix}x_proj_weight", (heads, rest, size), by_head),
        "scan_dt": leaf(f"{prefix}dt_proj_weight", (heads, size, mixer.rank), by_head),
        "scan_step": leaf(f"{prefix}dt_proj_bias", (channels,), (CHANNELS,), part=vector),
        "scan_skip": leaf(f"{prefix}D", (channels,), (CHANNELS,), part=vector),
        "scan_rate": replace(found["scan_rate"], part=Part(shape=(heads, size, states))),
    }
