"""Llama-Nemotron 49B, 51B and 253B: Llama whose layers a search made unlike: some attend with fewer
KV heads or not at all, MLPs are of several widths or left out. Sources: arXiv 2411.19146; vLLM's
DeciLMForCausalLM.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import (
    MLP,
    Layout,
    attn_biased,
    mlp_biased,
    read_decoder,
    read_forms,
)
from jaxkv.models.families.hybrid import without_attention
from jaxkv.models.spec import ModelSpec

KEY, STEP = "block_configs", 256
"""Widths of MLPs are made multiples of the second."""

HARMLESS = {"bias": False, "qkv_bias": False, "logit_scale": 1, "position_embedding_type": "rope"}
READ = ("no_op", "n_heads_in_group", "ffn_mult", "intermediate_size", "hidden_act")
"""Keys of blocks that are read; others may say nothing but that they are left out."""


class Form(NamedTuple):
    """Says what a layer is: by its number of KV heads and the width of its MLP, None for none."""

    kv_heads: int | None
    width: int | None


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    for key, harmless in HARMLESS.items():
        config.refuse(key, harmless)
    forms = _forms(config)
    kept = [layer for layer, form in enumerate(forms) if form != Form(None, None)]
    if not kept:
        raise config.fail(KEY, "a layer with attention or an MLP")
    config = config.replaced(num_hidden_layers=len(kept))
    spec, layout = read_forms([forms[layer] for layer in kept], lambda form: _read(config, form))
    return spec, replace(layout, numbers=tuple(kept) if len(kept) < len(forms) else ())


def _forms(config: ConfigReader) -> list[Form]:
    """Reads what each layer is."""
    given, num_layers = config.get(KEY), config.num_layers
    if (
        not isinstance(given, list)
        or len(given) != num_layers
        or not all(isinstance(one, dict) for one in given)
    ):
        raise config.fail(KEY, f"a list of an object for each of the {num_layers} layers")
    blocks = [ConfigReader(one, f"{config.where}: {KEY}: {i}") for i, one in enumerate(given)]
    return [Form(_kv_heads(config, one), _width(config, one)) for one in blocks]


def _kv_heads(config: ConfigReader, block: ConfigReader) -> int | None:
    own, heads = _part(block, "attention"), config.size("num_attention_heads")
    if own.flag("no_op", False):
        return None
    group = own.size("n_heads_in_group")
    if heads % group:
        raise own.fail("n_heads_in_group", f"a divisor of num_attention_heads={heads}")
    return heads // group


def _width(config: ConfigReader, block: ConfigReader) -> int | None:
    own = _part(block, "ffn")
    if own.flag("no_op", False):
        return None
    own.refuse("hidden_act", config.get("hidden_act", "silu"))
    if own.get("ffn_mult") is None:
        return own.size("intermediate_size")
    width = int(2 * own.number("ffn_mult") * config.size("hidden_size") / 3)
    return -(-width // STEP) * STEP


def _part(block: ConfigReader, key: str) -> ConfigReader:
    """Returns the reader of a block's part, which asks for nothing that is not read."""
    own = block.section(key)
    for name in own.values.keys() - set(READ):
        own.refuse(name, False)
    return own


def _read(config: ConfigReader, form: Form) -> tuple[ModelSpec, Layout]:
    """Reads the model as if all of its layers were of one form."""
    sizes = {"num_key_value_heads": form.kv_heads, "intermediate_size": form.width or 1}
    biased = attn_biased(config) + mlp_biased(config)
    spec, layout = read_decoder(config.replaced(**sizes), biased=biased)
    leaves = dict(layout.layers[0])
    if form.kv_heads is None:
        spec = replace(spec, groups=())
        leaves = without_attention(leaves)
        del leaves["attn_norm"]
    if form.width is None:
        names = {"mlp_norm", *MLP, *(f"{name}_bias" for name in MLP)}
        leaves = {name: one for name, one in leaves.items() if name not in names}
    return spec, replace(layout, layers=(leaves,))
