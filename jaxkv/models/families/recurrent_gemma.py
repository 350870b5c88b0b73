"""RecurrentGemma: RG-LRU, and attention within a window in some layers. Source: arXiv
2404.07839.
"""

from __future__ import annotations

from math import prod

import jax.numpy as jnp

from jaxkv.models.config_reader import MAX_LAYERS, ConfigReader
from jaxkv.models.families.base import (
    MLP,
    QKV,
    SLIDING,
    Layout,
    Leaf,
    Names,
    Part,
    leaf,
    read_decoder,
)
from jaxkv.models.families.delta import CHANNELS, MAX_KERNEL
from jaxkv.models.families.hybrid import with_mixer
from jaxkv.models.recurrent import RgLru
from jaxkv.models.spec import ModelSpec, Scales

NAMES = Names(
    norm="model.final_norm",
    attn_norm="temporal_pre_norm",
    mlp_norm="channel_pre_norm",
    q="temporal_block.q_proj",
    k="temporal_block.k_proj",
    v="temporal_block.v_proj",
    o="temporal_block.o_proj",
    gate="mlp_block.gate_proj",
    up="mlp_block.up_proj",
    down="mlp_block.down_proj",
)
RECURRENT, ATTENTION = "recurrent", "attention"
MAX_LEN = 8192
"""Limits the context as the published models do, whose configs do not say it."""


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    hidden, num_layers = config.size("hidden_size"), config.num_layers
    both = config.size("intermediate_size")
    if both % 2:
        raise config.fail("intermediate_size", "an even number, twice the width of the MLP")
    sized = config.with_defaults({"max_position_embeddings": MAX_LEN}).replaced(
        intermediate_size=both // 2, sliding_window=config.size("attention_window_size", 2048)
    )
    read = read_decoder(
        sized,
        names=NAMES,
        kinds=[SLIDING] * num_layers,
        biased=(*QKV * config.flag("attention_bias", False), "o", *MLP),
        partly=True,
        norm="rms_one",
        activation="hidden_activation",
        # transformers keeps this factor in bfloat16.
        scales=Scales(
            embed=float(jnp.bfloat16(hidden**0.5)), logit_cap=config.number("logits_soft_cap", 30.0)
        ),
    )
    mixer = _read_mixer(config, read[0].activation)
    pattern = config.get("block_types", [RECURRENT, RECURRENT, ATTENTION])
    known = isinstance(pattern, list) and 0 < len(pattern) <= MAX_LAYERS
    if not known or not all(one in (RECURRENT, ATTENTION) for one in pattern):
        raise config.fail("block_types", f"a list of {ATTENTION} and {RECURRENT}")
    layers = [i for i in range(num_layers) if pattern[i % len(pattern)] == RECURRENT]
    return with_mixer(read, layers, mixer, _leaves(mixer, hidden))


def _read_mixer(config: ConfigReader, activation: str) -> RgLru:
    channels = config.size("lru_width", config.size("hidden_size"))
    blocks = config.size("num_attention_heads")
    if channels % blocks:
        raise config.fail("lru_width", f"a multiple of num_attention_heads={blocks}")
    width = config.size("conv1d_width", 4, at_least=2, at_most=MAX_KERNEL)
    return RgLru(
        num_blocks=blocks, block_dim=channels // blocks, width=width, activation=activation
    )


def _leaves(mixer: RgLru, hidden: int) -> dict[str, Leaf]:
    """Describes the arrays of a layer's mixer."""
    prefix, blocks, size = f"{NAMES.layer}temporal_block.", mixer.num_blocks, mixer.block_dim
    channels = blocks * size

    def vector(source: str, *stored: int) -> Leaf:
        """Describes an array that no matmul reads: a vector, and not quantised."""
        part = Part(shape=stored) if len(stored) > 1 else None
        return leaf(prefix + source, (prod(stored),), (CHANNELS,), part=part)

    found = {
        "lru_conv": vector("conv_1d.weight", channels, 1, mixer.width),
        "lru_conv_bias": vector("conv_1d.bias", channels),
        "lru_rate": vector("rg_lru.recurrent_param", channels),
    }
    for name, source in (("lru_input_gate", "input_gate"), ("lru_decay_gate", "recurrent_gate")):
        found[name] = vector(f"rg_lru.{source}_weight", blocks, size, size)
        found[f"{name}_bias"] = vector(f"rg_lru.{source}_bias", blocks, size)
    for name in ("lru_x", "lru_y"):
        source = f"linear_{name[-1]}"
        found[name] = leaf(f"{prefix}{source}.weight", (channels, hidden), (CHANNELS, "model"))
        found[f"{name}_bias"] = vector(f"{source}.bias", channels)
    out = f"{prefix}linear_out"
    found["lru_out"] = leaf(f"{out}.weight", (hidden, channels), ("model", CHANNELS))
    return found | {"lru_out_bias": leaf(f"{out}.bias", (hidden,), ("model",))}
