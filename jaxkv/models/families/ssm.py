"""Describes Mamba2 of families: its sizes and tensors."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Any

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import FULL, Leaf, Part, leaf
from jaxkv.models.families.delta import CHANNELS, LINEAR, MAX_KERNEL
from jaxkv.models.families.hybrid import rows_of
from jaxkv.models.recurrent import Mamba2
from jaxkv.models.recurrent.mamba2 import PROJECTED

OLD_NAMES = {"mamba": LINEAR, "attention": FULL}
"""Maps kinds of layers as configs had them before transformers 5."""

CONVOLVED = ("ssm_x", "ssm_b", "ssm_c")


def read_mamba2(config: ConfigReader, *, inner: int, norm_eps: float, **more: Any) -> Mamba2:
    """Reads the sizes of Mamba2 as Bamba's config has them. inner: values of a token."""
    heads, groups = config.size("mamba_n_heads"), config.size("mamba_n_groups", 1)
    if inner % heads:
        raise config.fail("mamba_n_heads", f"a divisor of the {inner} values of a token")
    if heads % groups:
        raise config.fail("mamba_n_groups", f"a divisor of mamba_n_heads={heads}")
    head_dim = inner // heads
    if config.get("mamba_d_head") not in (None, "auto", head_dim):
        raise config.fail("mamba_d_head", f"auto or {head_dim}: {heads} of them are {inner}")
    width = config.size("mamba_d_conv", 4, at_most=MAX_KERNEL)
    if width < 2:
        raise config.fail("mamba_d_conv", f"a whole number from 2 to {MAX_KERNEL}")
    limit = config.get("time_step_limit")
    # transformers writes infinity in a way of its own.
    if limit is not None and limit not in ([0.0, inf], [0.0, {"__float__": "Infinity"}]):
        raise config.fail("time_step_limit", "0 and infinity (other limits are not built)")
    return Mamba2(
        num_heads=heads,
        head_dim=head_dim,
        num_groups=groups,
        state_dim=config.size("mamba_d_state"),
        width=width,
        norm_eps=norm_eps,
        **more,
    )


def read_bamba_mixer(
    config: ConfigReader, prefix: str, *, norm_eps: float
) -> tuple[Mamba2, dict[str, Leaf]]:
    """Reads Mamba2 as Bamba and Granite 4 have it, and its arrays behind this prefix. norm_eps: by
    default.
    """
    hidden, has_biases = config.size("hidden_size"), config.flag("mamba_proj_bias", False)
    mixer = read_mamba2(
        config,
        inner=config.size("mamba_expand", 2) * hidden,
        norm_eps=config.number("rms_norm_eps", norm_eps),
        activation=config.choice("hidden_act", "silu", ("silu",)),
    )
    leaves = mamba2_leaves(
        mixer,
        prefix,
        hidden,
        has_conv_bias=config.flag("mamba_conv_bias", True),
        has_in_bias=has_biases,
        has_out_bias=has_biases,
    )
    return mixer, leaves


def mamba2_leaves(
    mixer: Mamba2,
    prefix: str,
    hidden: int,
    *,
    has_norm: bool = True,
    has_conv_bias: bool = True,
    has_in_bias: bool = False,
    has_out_bias: bool = False,
) -> dict[str, Leaf]:
    """Describes the arrays of a mixer whose tensors are behind this prefix."""
    inner, rest = mixer.num_heads * mixer.head_dim, mixer.num_groups * mixer.state_dim
    sizes = dict(zip(PROJECTED, (inner, inner, rest, rest, mixer.num_heads), strict=True))
    by_group = None if mixer.axis is None else CHANNELS
    axes: dict[str, str | None] = dict.fromkeys(PROJECTED, CHANNELS)
    axes |= {"ssm_b": by_group, "ssm_c": by_group}
    found = rows_of(f"{prefix}in_proj.weight", sizes, hidden, axes)
    if has_in_bias:
        found |= _parts(f"{prefix}in_proj.bias", sizes, axes, "_bias")
    convolved = {name: sizes[name] for name in CONVOLVED}
    found |= _parts(f"{prefix}conv1d.weight", convolved, axes, "_conv", mixer.width)
    if has_conv_bias:
        found |= _parts(f"{prefix}conv1d.bias", convolved, axes, "_conv_bias")
    names = {"ssm_rate": "A_log", "ssm_skip": "D", "ssm_step": "dt_bias"}
    for name, source in names.items():
        found[name] = leaf(prefix + source, (mixer.num_heads,), (CHANNELS,))
    if has_norm:
        found["ssm_norm"] = leaf(f"{prefix}norm.weight", (inner,), (CHANNELS,))
    found["ssm_out"] = leaf(f"{prefix}out_proj.weight", (hidden, inner), ("model", CHANNELS))
    if has_out_bias:
        found["ssm_out_bias"] = leaf(f"{prefix}out_proj.bias", (hidden,), ("model",))
    return found


def _parts(
    source: str,
    sizes: Mapping[str, int],
    axes: Mapping[str, str | None],
    suffix: str,
    width: int | None = None,
) -> dict[str, Leaf]:
    """Describes vectors that are one behind the other in a tensor, or kernels of so many numbers
    for each place.
    """
    total, start, found = sum(sizes.values()), 0, {}
    shape = (total,) if width is None else (total, 1, width)
    for name, size in sizes.items():
        part = Part(shape=shape, start=start, stop=start + size)
        # A vector here: what no matmul reads is not quantised.
        found[name + suffix] = leaf(source, (size * (width or 1),), (axes[name],), part=part)
        start += size
    return found
