"""Zamba2: Mamba2, and in some layers a transformer block before it, whose weights several layers
share, each with products of low rank of its own. Source: arXiv 2411.15242.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

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
from jaxkv.models.recurrent import Mixer
from jaxkv.models.spec import AttentionSpec, ModelSpec
from jaxkv.weights.tree import LOW_DOWN, LOW_UP

HYBRID, BLOCK = "hybrid", "shared_transformer."
LONG = 16384
"""How long sequences may get where the config says `use_long_context`."""

RENAMED = {"mamba_n_heads": "n_mamba_heads", "mamba_n_groups": "mamba_ngroups"}


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    hidden, has_biases = config.size("hidden_size"), config.flag("add_bias_linear", False)
    if config.flag("use_long_context", False):
        config = config.replaced(max_position_embeddings=LONG)
    kinds = config.get("layers_block_type")
    if isinstance(kinds, list):  # anything else is refused where the kinds are read
        # Each layer adds to a shared block what stands at its place in this list.
        in_order = [layer for layer, kind in enumerate(kinds) if kind == HYBRID]
        config.refuse("hybrid_layer_ids", in_order)
    mixer = read_mamba2(
        config.renamed(**RENAMED),
        inner=config.size("mamba_expand", 2) * hidden,
        norm_eps=1e-5,
        least_step=config.number("time_step_min", 0.001),
    )
    return read_behind_blocks(
        config,
        BLOCK,
        mixer,
        lambda prefix: mamba2_leaves(
            mixer, prefix, hidden, has_in_bias=has_biases, has_out_bias=has_biases
        ),
        lambda leaves: _added(config, leaves),
        num_shared=config.size("num_mem_blocks", 1),
        is_fused=True,
        biased=("gate", "up", "down") * has_biases,
        ropes=None if config.flag("use_mem_rope", False) else [None] * config.num_layers,
    )


def read_behind_blocks(
    config: ConfigReader,
    block: str,
    mixer: Mixer,
    own: Callable[[str], Mapping[str, Leaf]],
    added: Callable[[Mapping[str, Leaf]], Mapping[str, Leaf]],
    *,
    num_shared: int,
    is_fused: bool = False,
    **decoder: Any,
) -> tuple[ModelSpec, Layout]:
    """Reads a model of mixers, some of them behind blocks of attention and MLP, of which layers
    share `num_shared`.

    block: what the names of its tensors begin with. own: returns the mixer's arrays behind a
    prefix. added: returns what layers add to the block's arrays. is_fused: gate and up are one
    tensor. decoder: what else `read_decoder` takes.
    """
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    if 2 * hidden % heads:
        raise config.fail("num_attention_heads", f"a divisor of 2 * hidden_size={2 * hidden}")
    config.refuse("tie_word_embeddings", True)  # transformers unties what layers share with it
    head_dim = 2 * hidden // heads
    spec, layout = read = read_decoder(
        config.replaced(head_dim=head_dim),
        names=_names(block, is_fused=is_fused),
        attention=AttentionSpec(scale=(head_dim / 2) ** -0.5),
        **decoder,
    )
    layers = range(spec.num_layers)
    kinds = config.kinds("layers_block_type", spec.num_layers, ("mamba", LINEAR, HYBRID))
    (leaves,) = layout.layers
    norm = leaves["attn_norm"]

    def read_form(form: str) -> tuple[ModelSpec, Layout]:
        """Reads the model as if all of its layers were of one form."""
        if form == LINEAR:
            one = replace(norm, source=f"{LAYER}input_layernorm.weight")
            found = {**own(f"{LAYER}mamba."), "attn_norm": one}
        else:
            shared = _block(leaves, f"{LAYER}{block}", hidden)
            shared |= added(shared)
            shared = {name: replace(one, num_shared=num_shared) for name, one in shared.items()}
            out = leaf(f"{LAYER}linear.weight", (hidden, hidden), ("model", "model"))
            found = {**own(f"{LAYER}mamba_decoder.mamba."), **shared}
            found |= {"attn_norm": norm, "ahead_out": out}
        mixed, _ = with_mixer(read, layers, mixer, found, beside=form == HYBRID)
        return mixed, replace(layout, layers=(found,))

    return read_forms([HYBRID if kind == HYBRID else LINEAR for kind in kinds], read_form)


def _names(block: str, *, is_fused: bool) -> Names:
    """Says what tensors are called in a layer with a block."""
    return Names(
        norm="model.final_layernorm",
        attn_norm="mamba_decoder.input_layernorm",
        mlp_norm=f"{block}pre_ff_layernorm",
        q=f"{block}self_attn.q_proj",
        k=f"{block}self_attn.k_proj",
        v=f"{block}self_attn.v_proj",
        o=f"{block}self_attn.o_proj",
        gate=f"{block}feed_forward.gate_proj",
        up=f"{block}feed_forward.up_proj",
        gate_up=f"{block}feed_forward.gate_up_proj" if is_fused else None,
        down=f"{block}feed_forward.down_proj",
    )


def _block(leaves: Mapping[str, Leaf], prefix: str, hidden: int) -> dict[str, Leaf]:
    """Describes a block, which reads the stream and the embeddings side by side."""
    found = {name: one for name, one in leaves.items() if name != "attn_norm"}
    found["ahead_norm"] = leaf(f"{prefix}input_layernorm.weight", (2 * hidden,), ("model",))
    for name in QKV:
        one = leaves[name]
        found[name] = leaf(one.source, (one.info.shape[0], 2 * hidden), one.info.logical_axes)
    return found


def _added(config: ConfigReader, leaves: Mapping[str, Leaf]) -> dict[str, Leaf]:
    """Describes what each layer adds to what layers share."""
    rows: dict[str, tuple[str, ...]] = {"feed_forward.gate_up_proj": ("gate", "up")}
    if config.flag("use_shared_attention_adapter", False):
        rows |= {f"self_attn.linear_{name}": (name,) for name in QKV}
    found: dict[str, Leaf] = {}
    for module, names in rows.items():
        found |= _low_rank(f"{LAYER}{BLOCK}{module}_adapter_list.{{use}}.", names, leaves, config)
    return found


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
