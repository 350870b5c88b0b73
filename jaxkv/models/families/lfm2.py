"""LFM2: short convolutions, and attention in a few layers. Source: transformers' Lfm2."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import FULL, Layout, Leaf, Names, Part, leaf, read_decoder
from jaxkv.models.families.hybrid import rows_of, with_mixer
from jaxkv.models.recurrent import ShortConv
from jaxkv.models.spec import ModelSpec

CONV = "conv"
NAMES = Names(
    norm="model.embedding_norm",
    attn_norm="operator_norm",
    mlp_norm="ffn_norm",
    o="self_attn.out_proj",
    q_norm="self_attn.q_layernorm",
    k_norm="self_attn.k_layernorm",
    gate="feed_forward.w1",
    up="feed_forward.w3",
    down="feed_forward.w2",
)


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    # Published configs have this name, where transformers writes the other one.
    if config.get("block_ff_dim") is not None:
        config = config.replaced(intermediate_size=config.size("block_ff_dim"))
    return read_lfm2(config.replaced(intermediate_size=_width(config)))


def read_lfm2(config: ConfigReader, **more: Any) -> tuple[ModelSpec, Layout]:
    """Reads LFM2 with what else a family of it has."""
    if config.get("tie_embedding") is not None:
        config = config.replaced(tie_word_embeddings=config.flag("tie_embedding", True))
    kinds = _kinds(config, config.num_layers)
    layers = [layer for layer, kind in enumerate(kinds) if kind == CONV]
    return read_convolutions(config, layers, names=NAMES, **more)


def read_convolutions(
    config: ConfigReader, layers: Sequence[int], **more: Any
) -> tuple[ModelSpec, Layout]:
    """Reads a decoder with a short convolution in these layers. more: of `read_decoder`."""
    channels, width = config.size("hidden_size"), config.size("conv_L_cache", at_least=2)
    return with_mixer(
        read_decoder(config, eps="norm_eps", **more),
        layers,
        ShortConv(channels=channels, width=width),
        _leaves(channels, width, has_biases=config.flag("conv_bias", False)),
    )


def _leaves(channels: int, width: int, *, has_biases: bool) -> dict[str, Leaf]:
    prefix, names = f"{NAMES.layer}conv.", ("conv_b", "conv_c", "conv_x")
    sizes, axes = dict.fromkeys(names, channels), dict.fromkeys(names, "channels")
    leaves = rows_of(f"{prefix}in_proj.weight", sizes, channels, axes)
    stored = Part(shape=(channels, 1, width))
    leaves["conv"] = leaf(f"{prefix}conv.weight", (channels * width,), ("channels",), part=stored)
    shape, both = (channels, channels), ("model", "channels")
    leaves["conv_out"] = leaf(f"{prefix}out_proj.weight", shape, both)
    if has_biases:
        for i, name in enumerate(names):
            place = Part(shape=(3 * channels,), start=i * channels, stop=(i + 1) * channels)
            source = f"{prefix}in_proj.bias"
            leaves[f"{name}_bias"] = leaf(source, (channels,), ("channels",), part=place)
        leaves["conv_bias"] = leaf(f"{prefix}conv.bias", (channels,), ("channels",))
        leaves["conv_out_bias"] = leaf(f"{prefix}out_proj.bias", (channels,), ("model",))
    return leaves


def _kinds(config: ConfigReader, num_layers: int) -> list[str]:
    """Reads what each layer is: `layer_types`, or attention in those of `full_attn_idxs`."""
    if config.get("layer_types") is not None:
        return config.kinds("layer_types", num_layers, (FULL, CONV))
    every = list(range(num_layers))
    full = config.whole_numbers("full_attn_idxs", every, at_least=0, at_most=num_layers - 1)
    return [FULL if layer in full else CONV for layer in range(num_layers)]


def _width(config: ConfigReader) -> int:
    """Reads the width of the MLP: two thirds of what the config says, rounded up."""
    width = config.size("intermediate_size")
    if not config.flag("block_auto_adjust_ff_dim", True):
        return width
    width = int(2 * width / 3)
    if config.get("block_ffn_dim_multiplier") is not None:
        width = int(config.number("block_ffn_dim_multiplier", 1.0) * width)
    multiple = config.size("block_multiple_of", 256)
    return max(1, -(-width // multiple)) * multiple
