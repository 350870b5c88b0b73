"""Jamba: Mamba, attention in every few layers, and experts in every other one. Source: arXiv
2403.19887.
"""

from __future__ import annotations

from typing import Any

from jaxkv.config import is_int
from jaxkv.models.config_reader import MAX_LAYERS, ConfigReader
from jaxkv.models.families.bamba import NAMES
from jaxkv.models.families.base import Layout, Leaf, Part, leaf, read_decoder
from jaxkv.models.families.delta import CHANNELS, MAX_KERNEL
from jaxkv.models.families.experts import MAX_EXPERTS, Experts, read_router
from jaxkv.models.families.hybrid import rows_of, with_mixer
from jaxkv.models.recurrent import Mamba
from jaxkv.models.spec import ModelSpec

PREFIX = f"{NAMES.layer}mamba."


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    num_layers = config.size("num_hidden_layers", at_most=MAX_LAYERS)
    full = _every(config, "attn_layer", num_layers)
    if not full:
        expected = f"less than {num_layers} layers (a model without attention is not built)"
        raise config.fail("attn_layer_offset", expected)
    hidden = config.size("hidden_size")
    width = config.size("mamba_d_conv", at_most=MAX_KERNEL)
    if width < 2:
        raise config.fail("mamba_d_conv", f"a whole number from 2 to {MAX_KERNEL}")
    config.choice("hidden_act", "silu", ("silu",))
    given = config.get("mamba_dt_rank", "auto")
    rank = -(-hidden // 16) if given == "auto" else config.size("mamba_dt_rank")
    mixer = Mamba(
        channels=config.size("mamba_expand") * hidden,
        state_dim=config.size("mamba_d_state"),
        rank=rank,
        width=width,
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
    read = read_decoder(config, family="jamba", names=NAMES, ropes=[None] * num_layers, **mixture)
    layers = [layer for layer in range(num_layers) if layer not in full]
    return with_mixer(read, layers, mixer, _leaves(config, mixer, hidden))


def _every(config: ConfigReader, key: str, num_layers: int) -> list[int]:
    """Lists the layers of a period, from its offset on."""
    period, offset = config.size(f"{key}_period"), config.get(f"{key}_offset", 0)
    if not is_int(offset) or not 0 <= offset < period:
        raise config.fail(f"{key}_offset", f"a whole number below {key}_period={period}")
    return list(range(offset, num_layers, period))


def _leaves(config: ConfigReader, mixer: Mamba, hidden: int) -> dict[str, Leaf]:
    """Describes the arrays of a layer's mixer."""
    channels, states = mixer.channels, mixer.state_dim
    rest = mixer.rank + 2 * states
    names = ("scan_x", "scan_z")
    axes = dict.fromkeys(names, CHANNELS)
    found = rows_of(f"{PREFIX}in_proj.weight", dict.fromkeys(names, channels), hidden, axes)
    own = ((channels,), (CHANNELS,))
    if config.flag("mamba_proj_bias", False):
        for i, name in enumerate(names):
            part = Part(shape=(2 * channels,), start=i * channels, stop=(i + 1) * channels)
            found[f"{name}_bias"] = leaf(f"{PREFIX}in_proj.bias", *own, part=part)
        found["scan_out_bias"] = leaf(f"{PREFIX}out_proj.bias", (hidden,), ("model",))
    # Vectors here: what no matmul reads is not quantised.
    part = Part(shape=(channels, 1, mixer.width))
    kernels = ((channels * mixer.width,), (CHANNELS,))
    found["scan_conv"] = leaf(f"{PREFIX}conv1d.weight", *kernels, part=part)
    if config.flag("mamba_conv_bias", True):
        found["scan_conv_bias"] = leaf(f"{PREFIX}conv1d.bias", *own)
    part = Part(shape=(channels, states))
    found["scan_rate"] = leaf(f"{PREFIX}A_log", (channels * states,), (CHANNELS,), part=part)
    for name, size in (("dt", mixer.rank), ("b", states), ("c", states)):
        source = f"{PREFIX}{name}_layernorm.weight"
        found[f"scan_{name}_norm"] = leaf(source, (size,), (None,))
    return found | {
        "scan_rest": leaf(f"{PREFIX}x_proj.weight", (rest, channels), (None, CHANNELS)),
        "scan_dt": leaf(f"{PREFIX}dt_proj.weight", (channels, mixer.rank), (CHANNELS, None)),
        "scan_step": leaf(f"{PREFIX}dt_proj.bias", *own),
        "scan_skip": leaf(f"{PREFIX}D", *own),
        "scan_out": leaf(f"{PREFIX}out_proj.weight", (hidden, channels), ("model", CHANNELS)),
    }
