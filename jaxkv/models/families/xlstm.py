"""xLSTM: layers of an mLSTM and an MLP each, without attention. Source: arXiv 2503.13427."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import Layout, Leaf, Names, Part, leaf, read_decoder
from jaxkv.models.families.delta import CHANNELS
from jaxkv.models.families.hybrid import rows_of, with_mixer
from jaxkv.models.families.ssm import MAX_LEN
from jaxkv.models.recurrent import MLstm
from jaxkv.models.spec import ModelSpec, Scales

LAYER = "backbone.blocks.{layer}."
NAMES = Names(
    embed="backbone.embeddings",
    norm="backbone.out_norm",
    layer=LAYER,
    attn_norm="norm_mlstm",
    mlp_norm="norm_ffn",
    gate="ffn.proj_up_gate",
    up="ffn.proj_up",
    down="ffn.proj_down",
)
SINGLE, FUSED = "single", "fused"
MAX_CAP = 30.0
"""exp of it, added up over all tokens of a long text, is far within float32."""


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    config = _one_name(config)
    num_layers, hidden = config.num_layers, config.size("hidden_size")
    config.refuse("use_bias", False)
    config.refuse("inference_state_dtype", "float32")
    is_fused = config.choice("weight_mode", SINGLE, (SINGLE, FUSED)) == FUSED
    names = replace(NAMES, gate_up="ffn.proj_up_gate_z") if is_fused else NAMES
    multiple = config.size("ffn_round_up_to_multiple_of", 64)
    ffn = hidden * config.number("ffn_proj_factor", 2.667)
    # What there is none of has to have a size.
    sizes = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": None}
    sizes["intermediate_size"] = max(1, int((ffn + multiple - 1) // multiple * multiple))
    # transformers ties nothing here, whatever the config says.
    own = config.replaced(**sizes, tie_word_embeddings=False, hidden_act="silu")
    read = read_decoder(
        own.with_defaults({"max_position_embeddings": MAX_LEN}),
        names=names,
        ropes=[None] * num_layers,
        eps="norm_eps",
        scales=Scales(logit_cap=config.number("output_logit_soft_cap", 30.0)),
    )
    mixer = _mixer(config, hidden)
    return with_mixer(read, range(num_layers), mixer, _leaves(mixer, hidden, is_fused=is_fused))


def _one_name(config: ConfigReader) -> ConfigReader:
    """Returns the config with sizes under the names that transformers has for all models."""
    found = {}
    for key, other in (("hidden_size", "embedding_dim"), ("num_hidden_layers", "num_blocks")):
        if config.get(other) is not None:
            found[key] = config.size(other)
            if config.get(key, found[key]) != found[key]:
                raise config.fail(other, f"{config.get(key)}, as {key} says")
    return config.replaced(**found)


def _mixer(config: ConfigReader, hidden: int) -> MLstm:
    heads, cap = config.size("num_heads"), config.number("gate_soft_cap", 15.0)
    if cap > MAX_CAP:
        raise config.fail(
            "gate_soft_cap", f"at most {MAX_CAP} (exponents are added up as they are)"
        )
    dims = []
    for key, default in (("qk_dim_factor", 0.5), ("v_dim_factor", 1.0)):
        size = int(hidden * config.number(key, default))
        if not size or size % heads:
            raise config.fail(key, f"a part of hidden_size={hidden} that {heads} heads divide")
        dims.append(size // heads)
    return MLstm(
        num_heads=heads,
        key_dim=dims[0],
        value_dim=dims[1],
        cap=cap,
        eps=config.number("eps", 1e-6),
        norm_eps=config.number("norm_eps", 1e-6),
    )


def _leaves(mixer: MLstm, hidden: int, *, is_fused: bool) -> Mapping[str, Leaf]:
    prefix, heads = f"{LAYER}mlstm_layer.", mixer.num_heads
    keys, values = heads * mixer.key_dim, heads * mixer.value_dim
    sizes = {"lstm_q": keys, "lstm_k": keys, "lstm_v": values, "lstm_gate": values}
    gates, axes = {"lstm_in": heads, "lstm_forget": heads}, (CHANNELS, "model")
    found = {
        "lstm_norm": leaf(f"{prefix}multihead_norm.weight", (values,), (CHANNELS,)),
        "lstm_out": leaf(f"{prefix}out_proj.weight", (hidden, values), axes[::-1]),
    }
    if is_fused:
        of_rows = dict.fromkeys((*sizes, *gates), CHANNELS)
        found |= rows_of(f"{prefix}qkv_opreact.weight", sizes, hidden, of_rows)
        source = f"{prefix}ifgate_preact."
        found |= rows_of(f"{source}weight", gates, hidden, of_rows)
        for start, name in ((0, "in"), (heads, "forget")):
            part = Part(shape=(2 * heads,), start=start, stop=start + heads)
            found[f"lstm_{name}_bias"] = leaf(f"{source}bias", (heads,), (CHANNELS,), part=part)
        return found
    names = ("q", "k", "v", "ogate_preact")
    for source, (name, size) in zip(names, sizes.items(), strict=True):
        found[name] = leaf(f"{prefix}{source}.weight", (size, hidden), axes)
    for source, name in (("igate_preact", "lstm_in"), ("fgate_preact", "lstm_forget")):
        found[name] = leaf(f"{prefix}{source}.weight", (heads, hidden), axes)
        found[f"{name}_bias"] = leaf(f"{prefix}{source}.bias", (heads,), (CHANNELS,))
    return found
