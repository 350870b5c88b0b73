"""Zamba2: Mamba2, and in some layers a transformer block before it, whose weights several layers
share, each with products of low rank of its own. Source: arXiv 2411.15242.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import (
    LAYER,
    QKV,
    Layout,
    Leaf,
    Names,
    leaf,
    read_decoder,
    read_forms,
)
from jaxkv.models.families.delta import LINEAR
from jaxkv.models.families.hybrid import rows_of, with_mixer
from jaxkv.models.families.ssm import mamba2_leaves, read_mamba2
from jaxkv.models.spec import AttentionSpec, ModelSpec
from jaxkv.weights.tree import LOW_DOWN, LOW_UP

HYBRID, BLOCK = "hybrid", "shared_transformer."
FORMS = {"mamba": LINEAR, LINEAR: LINEAR, HYBRID: HYBRID}
LONG = 16384
"""How long sequences may get where the config says `use_long_context`."""

NAMES = Names(
    norm="model.final_layernorm",
    attn_norm="mamba_decoder.input_layernorm",
    mlp_norm=f"{BLOCK}pre_ff_layernorm",
    q=f"{BLOCK}self_attn.q_proj",
    k=f"{BLOCK}self_attn.k_proj",
    v=f"{BLOCK}self_attn.v_proj",
    o=f"{BLOCK}self_attn.o_proj",
    gate_up=f"{BLOCK}feed_forward.gate_up_proj",
    down=f"{BLOCK}feed_forward.down_proj",
)
RENAMED = {"mamba_n_heads": "n_mamba_heads", "mamba_n_groups": "mamba_ngroups"}


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    if 2 * hidden % heads:
        raise config.fail("num_attention_heads", f"a divisor of 2 * hidden_size={2 * hidden}")
    config.refuse("tie_word_embeddings", True)  # transformers unties what layers share with it
    config = config.replaced(head_dim=2 * hidden // heads)
    if config.flag("use_long_context", False):
        config = config.replaced(max_position_embeddings=LONG)
    forms = config.kinds("layers_block_type", config.num_layers, tuple(FORMS))
    return read_forms([FORMS[form] for form in forms], lambda form: _read_form(config, form))


def _read_form(config: ConfigReader, form: str) -> tuple[ModelSpec, Layout]:
    """Reads the model as if all of its layers were of one form."""
    has_biases, num_layers = config.flag("add_bias_linear", False), config.num_layers
    spec, layout = read = read_decoder(
        config,
        names=NAMES,
        biased=("gate", "up", "down") * has_biases,
        ropes=None if config.flag("use_mem_rope", False) else [None] * num_layers,
        attention=AttentionSpec(scale=(config.head_dim / 2) ** -0.5),
    )
    (leaves,), is_hybrid = layout.layers, form == HYBRID
    mixer = read_mamba2(
        config.renamed(**RENAMED),
        inner=config.size("mamba_expand", 2) * spec.hidden_size,
        norm_eps=1e-5,
        least_step=config.number("time_step_min", 0.001),
    )
    own = mamba2_leaves(
        mixer,
        f"{LAYER}mamba_decoder.mamba." if is_hybrid else f"{LAYER}mamba.",
        spec.hidden_size,
        has_in_bias=has_biases,
        has_out_bias=has_biases,
    )
    spec, _ = with_mixer(read, range(num_layers), mixer, own, beside=is_hybrid)
    norm = leaves["attn_norm"]
    if is_hybrid:
        own |= {**_block(config, leaves), "attn_norm": norm}
    else:
        own["attn_norm"] = replace(norm, source=f"{LAYER}input_layernorm.weight")
    return spec, replace(layout, layers=(own,))


def _block(config: ConfigReader, leaves: Mapping[str, Leaf]) -> dict[str, Leaf]:
    """Describes the block before Mamba2: what layers share, and what each has for itself."""
    hidden, num_shared = config.size("hidden_size"), config.size("num_mem_blocks", 1)
    shared = {name: one for name, one in leaves.items() if name != "attn_norm"}
    source = f"{LAYER}{BLOCK}input_layernorm.weight"
    shared["ahead_norm"] = leaf(source, (2 * hidden,), ("model",))
    rows: dict[str, tuple[str, ...]] = {"feed_forward.gate_up_proj": ("gate", "up")}
    if config.flag("use_shared_attention_adapter", False):
        rows |= {f"self_attn.linear_{name}": (name,) for name in QKV}
    for name in QKV:  # they read the stream and the embeddings side by side
        one = leaves[name]
        shared[name] = leaf(one.source, (one.info.shape[0], 2 * hidden), one.info.logical_axes)
    for module, names in rows.items():
        shared |= _low_rank(f"{LAYER}{BLOCK}{module}_adapter_list.{{use}}.", names, shared, config)
    shared = {name: replace(one, num_shared=num_shared) for name, one in shared.items()}
    out = leaf(f"{LAYER}linear.weight", (hidden, hidden), ("model", "model"))
    return {**shared, "ahead_out": out}


def _low_rank(
    prefix: str, names: Sequence[str], leaves: Mapping[str, Leaf], config: ConfigReader
) -> dict[str, Leaf]:
    """Describes what each layer adds to matrices that are one module: one matrix goes down for all
    of them, and what goes up has the rows of one after the other.
    """
    rank, infos = config.size("adapter_rank", 128), {name: leaves[name].info for name in names}
    sizes = {LOW_UP + name: info.shape[0] for name, info in infos.items()}
    axes = {LOW_UP + name: info.logical_axes[0] for name, info in infos.items()}
    found = rows_of(f"{prefix}1.weight", sizes, rank, axes)
    for name, info in infos.items():
        shape = (rank, info.shape[1])
        found[LOW_DOWN + name] = leaf(f"{prefix}0.weight", shape, (None, "model"))
    return found
