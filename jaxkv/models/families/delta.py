"""Describes Gated DeltaNet and gated attention of families: their sizes and tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import FULL, Layout, Leaf, Part, leaf
from jaxkv.models.families.hybrid import rows_of
from jaxkv.models.recurrent import GatedDelta
from jaxkv.models.spec import ModelSpec

LINEAR, CHANNELS = "linear_attention", "channels"
MIXED = ("delta_q", "delta_k", "delta_v")
"""Matrices whose results a convolution mixes."""

MAX_KERNEL = 64
"""Tokens that a short convolution sees at most."""

CONV_ACTIVATIONS = ("silu",)
"""An MLP may have these: configs name one for it and for the convolution, which has this one."""


def read_linear_layers(config: ConfigReader, *, every: int) -> list[int]:
    """Lists the layers with a recurrence: by `layer_types`, and without it all but the last of
    every so many.
    """
    num_layers = config.num_layers
    otherwise = [FULL if (i + 1) % every == 0 else LINEAR for i in range(num_layers)]
    kinds = config.kinds("layer_types", num_layers, (FULL, LINEAR), otherwise)
    return [layer for layer, kind in enumerate(kinds) if kind == LINEAR]


def read_gated_delta(config: ConfigReader, *, norm_eps: float) -> GatedDelta:
    """Reads the sizes of Gated DeltaNet as Qwen3-Next's config has them."""
    key_heads = config.size("linear_num_key_heads")
    num_heads = config.size("linear_num_value_heads")
    if num_heads % key_heads:
        expected = f"a multiple of linear_num_key_heads={key_heads}"
        raise config.fail("linear_num_value_heads", expected)
    kernel = config.size("linear_conv_kernel_dim", at_least=2, at_most=MAX_KERNEL)
    return GatedDelta(
        num_key_heads=key_heads,
        num_heads=num_heads,
        key_dim=config.size("linear_key_head_dim"),
        value_dim=config.size("linear_value_head_dim"),
        kernel=kernel,
        norm_eps=norm_eps,
    )


def read_kimi_delta(config: ConfigReader) -> GatedDelta:
    """Reads the sizes of Kimi delta attention: those in `linear_attn_config`, or as transformers
    writes them.
    """
    own = config.section("linear_attn_config")
    num_heads = own.size("num_heads", config.size("linear_num_heads", 32))
    dim = own.size("head_dim", config.size("linear_head_dim", 128))
    kernel = config.size("linear_conv_kernel_dim", 4, at_most=MAX_KERNEL)
    kernel = own.size("short_conv_kernel_size", kernel, at_most=MAX_KERNEL)
    if kernel < 2:
        raise config.fail("linear_conv_kernel_dim", f"a whole number from 2 to {MAX_KERNEL}")
    return GatedDelta(
        num_key_heads=num_heads,
        num_heads=num_heads,
        key_dim=dim,
        value_dim=dim,
        kernel=kernel,
        norm_eps=config.number("rms_norm_eps", 1e-5),
        by_channel=True,
        gate="sigmoid",
    )


def read_least(config: ConfigReader, key: str, default: float) -> float:
    """Reads a least decay (`GatedDelta.least_decay`), a number below 0."""
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not -1e3 <= value < 0:
        raise config.fail(key, "a number from -1000 to below 0")
    return float(value)


def delta_sizes(mixer: GatedDelta) -> dict[str, int]:
    """Counts the rows of each matrix of the mixer but the last."""
    keys, values = mixer.num_key_heads * mixer.key_dim, mixer.num_heads * mixer.value_dim
    mixed = {"delta_q": keys, "delta_k": keys, "delta_v": values, "delta_gate": values}
    return mixed | {"delta_b": mixer.num_heads, "delta_step": mixer.num_steps}


def matrices_of(
    mixer: GatedDelta,
    source: str,
    names: tuple[str, ...],
    hidden: int,
    *,
    by_key_head: bool = False,
) -> dict[str, Leaf]:
    """Describes these matrices of the mixer, whose rows one tensor has: those of the first, those
    of the second, and so on, for each key head or of all.
    """
    sizes = {name: delta_sizes(mixer)[name] for name in names}
    blocks = mixer.num_key_heads if by_key_head else 1
    axes = dict.fromkeys(names, CHANNELS)
    return rows_of(f"{source}.weight", sizes, hidden, axes, num_blocks=blocks)


def rest_of(
    mixer: GatedDelta, prefix: str, hidden: int, *, conv: str, norm: str, out: str
) -> dict[str, Leaf]:
    """Describes what all families store alike: convolution, decay, norm and output.

    conv: the tensor with the kernels of all channels, or with {name} the one for q, k or v.
    """
    total, start, found = mixer.arrays[0].shape[0], 0, {}
    for name in MIXED:
        count = delta_sizes(mixer)[name]
        whole, first = (count, 0) if "{name}" in conv else (total, start)
        part = Part(shape=(whole, 1, mixer.kernel), start=first, stop=first + count)
        source = f"{prefix}{conv}.weight".replace("{name}", name[-1])
        # A vector here: what no matmul reads is not quantised.
        found[f"{name}_conv"] = leaf(source, (count * mixer.kernel,), (CHANNELS,), part=part)
        start += count
    values = mixer.num_heads * mixer.value_dim
    return found | {
        "delta_rate": leaf(f"{prefix}A_log", (mixer.num_heads,), (CHANNELS,)),
        "delta_step_bias": leaf(f"{prefix}dt_bias", (mixer.num_steps,), (CHANNELS,)),
        "delta_norm": leaf(f"{prefix}{norm}.weight", (mixer.value_dim,), ("head_dim",)),
        "delta_out": leaf(f"{prefix}{out}.weight", (hidden, values), ("model", CHANNELS)),
    }


def low_rank_leaves(mixer: GatedDelta, prefix: str, hidden: int) -> dict[str, Leaf]:
    """Describes Kimi delta attention whose gates and steps go through as few channels as a head
    has.
    """
    found = rest_of(mixer, prefix, hidden, conv="{name}_conv1d", norm="o_norm", out="o_proj")
    for name in ("q", "k", "v", "b"):
        found |= matrices_of(mixer, f"{prefix}{name}_proj", (f"delta_{name}",), hidden)
    width = mixer.value_dim
    for name, source in (("gate", "g"), ("step", "f")):
        found |= matrices_of(mixer, f"{prefix}{source}_b_proj", (f"delta_{name}",), width)
        inner = leaf(f"{prefix}{source}_a_proj.weight", (width, hidden), (None, "model"))
        found[f"delta_{name}_in"] = inner
    return found


def with_gates(read: tuple[ModelSpec, Layout]) -> tuple[ModelSpec, Layout]:
    """Returns a decoder whose attention has gates of its outputs, stored with the queries: each
    head's behind its query.
    """
    spec, layout = read
    return spec, replace(layout, layers=tuple(_gated(spec, one) for one in layout.layers))


def _gated(spec: ModelSpec, leaves: Mapping[str, Leaf]) -> dict[str, Leaf]:
    found = dict(leaves)
    for suffix in ("", "_bias"):
        if (one := leaves.get(f"q{suffix}")) is not None:
            rows, *rest = one.info.shape
            dim, shape = rows // spec.num_heads, (2 * rows, *rest)
            for name, start in (("q", 0), ("attn_gate", dim)):
                part = Part(shape, num_blocks=spec.num_heads, start=start, stop=start + dim)
                found[name + suffix] = replace(one, part=part)
    return found
