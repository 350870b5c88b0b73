"""Describes Mamba and Mamba2 of families: their sizes and tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import inf
from typing import Any

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import FULL, Layout, Leaf, Names, Part, leaf, read_decoder
from jaxkv.models.families.delta import CHANNELS, LINEAR, MAX_KERNEL
from jaxkv.models.families.hybrid import rows_of, with_mixer
from jaxkv.models.recurrent import Mamba, Mamba2, Mixer
from jaxkv.models.recurrent.mamba2 import PROJECTED
from jaxkv.models.spec import ModelSpec

OLD_NAMES = {"mamba": LINEAR, "attention": FULL}
"""Maps kinds of layers as configs had them before transformers 5."""

CONVOLVED = ("ssm_x", "ssm_b", "ssm_c")

ONLY = Names(
    embed="backbone.embeddings",
    norm="backbone.norm_f",
    layer="backbone.layers.{layer}.",
    attn_norm="norm",
)
"""Names of a model of nothing but mixers."""

MAX_LEN = 2**15


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
    width = _width(config)
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


def _width(config: ConfigReader) -> int:
    """Reads how many tokens the convolution sees."""
    return config.size("mamba_d_conv", 4, at_least=2, at_most=MAX_KERNEL)


def read_mamba(config: ConfigReader, *, channels: int, norm_eps: float | None) -> Mamba:
    """Reads the sizes of Mamba as Jamba's config has them. channels, norm_eps: as in `Mamba`."""
    hidden, given = config.size("hidden_size"), config.get("mamba_dt_rank", "auto")
    config.choice("hidden_act", "silu", ("silu",))
    return Mamba(
        channels=channels,
        state_dim=config.size("mamba_d_state", 16),
        rank=-(-hidden // 16) if given == "auto" else config.size("mamba_dt_rank"),
        width=_width(config),
        norm_eps=norm_eps,
    )


def mamba_leaves(
    mixer: Mamba,
    prefix: str,
    hidden: int,
    *,
    has_norms: bool = False,
    has_conv_bias: bool,
    has_biases: bool,
) -> dict[str, Leaf]:
    """Describes the arrays of a mixer whose tensors are behind this prefix."""
    channels, states = mixer.channels, mixer.state_dim
    rest = mixer.rank + 2 * states
    names = ("scan_x", "scan_z")
    sizes, axes = dict.fromkeys(names, channels), dict.fromkeys(names, CHANNELS)
    found = rows_of(f"{prefix}in_proj.weight", sizes, hidden, axes)
    own = ((channels,), (CHANNELS,))
    if has_biases:
        found |= _parts(f"{prefix}in_proj.bias", sizes, axes, "_bias")
        found["scan_out_bias"] = leaf(f"{prefix}out_proj.bias", (hidden,), ("model",))
    # Vectors here: what no matmul reads is not quantised.
    part = Part(shape=(channels, 1, mixer.width))
    kernels = ((channels * mixer.width,), (CHANNELS,))
    found["scan_conv"] = leaf(f"{prefix}conv1d.weight", *kernels, part=part)
    if has_conv_bias:
        found["scan_conv_bias"] = leaf(f"{prefix}conv1d.bias", *own)
    part = Part(shape=(channels, states))
    found["scan_rate"] = leaf(f"{prefix}A_log", (channels * states,), (CHANNELS,), part=part)
    for name, size in (("dt", mixer.rank), ("b", states), ("c", states)) * has_norms:
        source = f"{prefix}{name}_layernorm.weight"
        found[f"scan_{name}_norm"] = leaf(source, (size,), (None,))
    return found | {
        "scan_rest": leaf(f"{prefix}x_proj.weight", (rest, channels), (None, CHANNELS)),
        "scan_dt": leaf(f"{prefix}dt_proj.weight", (channels, mixer.rank), (CHANNELS, None)),
        "scan_step": leaf(f"{prefix}dt_proj.bias", *own),
        "scan_skip": leaf(f"{prefix}D", *own),
        "scan_out": leaf(f"{prefix}out_proj.weight", (hidden, channels), ("model", CHANNELS)),
    }


def read_only_mixers(
    config: ConfigReader, mixer: Mixer, leaves: Mapping[str, Leaf]
) -> tuple[ModelSpec, Layout]:
    """Reads a model whose layers are a norm and a mixer each, without attention and MLP.

    How long a sequence may get no checkpoint says, as states are of one size: `MAX_LEN` tokens.
    """
    num_layers = config.num_layers
    # What there is none of has to have a size.
    sizes = dict.fromkeys(("num_attention_heads", "num_key_value_heads", "intermediate_size"), 1)
    config = config.with_defaults({"max_position_embeddings": MAX_LEN}).replaced(**sizes)
    read = read_decoder(config, names=ONLY, ropes=[None] * num_layers, eps="layer_norm_epsilon")
    spec, layout = with_mixer(read, range(num_layers), mixer, leaves)
    own = {"attn_norm": layout.layers[0]["attn_norm"], **leaves}
    return spec, replace(layout, layers=(own,))


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
