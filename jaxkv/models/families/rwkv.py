"""RWKV-4: layers of two recurrent mixers each, without attention. Source: arXiv 2305.13048.

transformers halves the stream every `rescale_every` layers, so that float16 holds it. Here, as in
training, it stays what it is. The two differ by what norms add to variances, 1e-5: after n halvings
that is as much as 4**n times of it here.
"""

from __future__ import annotations

from dataclasses import replace

from jaxkv.models.config_reader import MAX_LAYERS, ConfigReader
from jaxkv.models.families.base import (
    Layout,
    Leaf,
    Names,
    Part,
    leaf,
    read_decoder,
    read_forms,
)
from jaxkv.models.families.delta import CHANNELS
from jaxkv.models.families.hybrid import with_mixer
from jaxkv.models.recurrent import ChannelMix, Mixer, TimeMix
from jaxkv.models.spec import ModelSpec

NAMES = Names(
    embed="rwkv.embeddings", norm="rwkv.ln_out", head="head", layer="rwkv.blocks.{layer}."
)
BLOCK = "rwkv.blocks.{pair}."
"""Begins the names of both layers that one of the config's is here."""

FIRST = "rwkv.blocks.0.pre_ln"
TIME, CHANNEL = "attention", "feed_forward"


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    hidden = config.size("hidden_size")
    config.refuse("attention_hidden_size", hidden)
    ffn = config.size("intermediate_size", 4 * hidden)
    num_layers = 2 * config.size("num_hidden_layers", at_most=MAX_LAYERS // 2)
    config.refuse("layer_norm_epsilon", 1e-5)  # the last norm has no other
    own = config.replaced(
        num_hidden_layers=num_layers,
        max_position_embeddings=config.size("context_length", 1024),
        intermediate_size=ffn,
        # What there is none of has to have a size.
        num_attention_heads=1,
        num_key_value_heads=1,
    )
    read = read_decoder(
        own, names=NAMES, biased=("norm",), ropes=[None] * num_layers, eps=None, norm="layer"
    )
    layout = read[1].with_top(**_norm("embed_norm", FIRST, hidden))
    forms: dict[str, tuple[Mixer, dict[str, Leaf]]] = {
        TIME: (TimeMix(size=hidden), _time_leaves(hidden)),
        CHANNEL: (ChannelMix(size=hidden), _channel_leaves(hidden, ffn)),
    }

    def read_form(form: str) -> tuple[ModelSpec, Layout]:
        mixer, leaves = forms[form]
        mixed, _ = with_mixer(read, range(num_layers), mixer, leaves)
        return mixed, replace(layout, layers=(leaves,))

    return read_forms([TIME, CHANNEL] * (num_layers // 2), read_form)


def _time_leaves(hidden: int) -> dict[str, Leaf]:
    prefix, shape = f"{BLOCK}{TIME}.", (hidden, hidden)
    found = _norm("attn_norm", f"{BLOCK}ln1", hidden)
    for name, source in (("key", "key"), ("value", "value"), ("gate", "receptance")):
        found[f"time_{name}"] = leaf(f"{prefix}{source}.weight", shape, (CHANNELS, "model"))
        found |= _share(f"time_mix_{name}", f"{prefix}time_mix_{source}", hidden)
    for name, source in (("decay", "time_decay"), ("bonus", "time_first")):
        found[f"time_{name}"] = leaf(f"{prefix}{source}", (hidden,), (CHANNELS,))
    found["time_out"] = leaf(f"{prefix}output.weight", shape, ("model", CHANNELS))
    return found


def _channel_leaves(hidden: int, ffn: int) -> dict[str, Leaf]:
    prefix = f"{BLOCK}{CHANNEL}."
    found = _norm("attn_norm", f"{BLOCK}ln2", hidden)
    # What gates the whole result every device has.
    matrices = (("key", "key", ffn, "ffn"), ("gate", "receptance", hidden, None))
    for name, source, size, axis in matrices:
        found[f"channel_{name}"] = leaf(f"{prefix}{source}.weight", (size, hidden), (axis, "model"))
        found |= _share(f"channel_mix_{name}", f"{prefix}time_mix_{source}", hidden)
    found["channel_out"] = leaf(f"{prefix}value.weight", (hidden, ffn), ("model", "ffn"))
    return found


def _norm(name: str, source: str, hidden: int) -> dict[str, Leaf]:
    return {
        name: leaf(f"{source}.weight", (hidden,), ("model",)),
        f"{name}_bias": leaf(f"{source}.bias", (hidden,), ("model",)),
    }


def _share(name: str, source: str, hidden: int) -> dict[str, Leaf]:
    """Describes how much of each number is the token's own, the rest being that before it."""
    return {name: leaf(source, (hidden,), ("model",), part=Part(shape=(1, 1, hidden)))}
