"""Describes latent attention (`models.latent`) as DeepSeek's configs and checkpoints have it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxkv.config import is_int
from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import LAYER, Layout, Leaf, Part, leaf, read_decoder
from jaxkv.models.families.hybrid import INDEX, with_leaves, without_attention
from jaxkv.models.rope_config import read_rope, rope_section, yarn_mscale
from jaxkv.models.spec import AttentionSpec, IndexSpec, ModelSpec, QueryTemperature, RopeSpec
from jaxkv.ops.attention.sweep import BLOCK

MAX_HEAD = 2**14
"""Bounds the sizes of a head's parts and of a latent."""

LANES = 128
"""Rows with a key for being chosen have a multiple of so many numbers where they have more: XLA:TPU
has numbers in tiles of as many, and copies all pages to reach single rows of another size (the 704
of DeepSeek-V3.2 and GLM-5, compiled for v6e).
"""


def read_latent(
    config: ConfigReader,
    *,
    interleaved: bool = True,
    rotates: bool = True,
    temperature: QueryTemperature | None = None,
    index: IndexSpec | None = None,
    **more: Any,
) -> tuple[ModelSpec, Layout]:
    """Reads a decoder whose layers have latent attention. rotates: a part of each head is
    rotated. index: how keys are chosen. more: as `read_decoder` takes it.

    Raises: CheckpointError for sizes that are none, or a rotated part that is odd.
    """
    num_heads, hidden = config.size("num_attention_heads"), config.size("hidden_size")
    rank = config.size("kv_lora_rank", at_most=MAX_HEAD)
    plain = config.size("qk_nope_head_dim", at_most=MAX_HEAD)
    has_none = not rotates and config.get("qk_rope_head_dim") == 0
    rotated = 0 if has_none else config.size("qk_rope_head_dim", at_most=MAX_HEAD)
    if rotated % 2:
        raise config.fail("qk_rope_head_dim", "an even number (rotary embedding pairs it)")
    if config.get("num_key_value_heads", num_heads) != num_heads:
        raise config.fail("num_key_value_heads", f"{num_heads}, one for each query head")
    rope, factor = _rope(config, rotated or 2, interleaved)  # which nothing is rotated by if 0
    config = config.replaced(num_key_value_heads=num_heads, head_dim=plain + rotated)
    spec, layout = read_decoder(
        config,
        ropes=[rope if rotates else None] * config.num_layers,
        attention=AttentionSpec(
            scale=factor * (plain + rotated) ** -0.5, temperature=temperature, index=index
        ),
        **more,
    )
    size = rank + rotated
    if index is not None:
        size += index.head_dim * (1 if index.pool == 1 else 2)
        if size > LANES:
            size = -(-size // LANES) * LANES
    groups = tuple(
        replace(group, num_kv_heads=1, head_dim=size, latent_dim=rank) for group in spec.groups
    )
    own = _leaves(config, spec, (plain, rotated, rank), hidden)
    layers = tuple({**without_attention(layer), **own} for layer in layout.layers)
    return replace(spec, groups=groups), replace(layout, layers=layers)


def _rope(config: ConfigReader, rotated: int, interleaved: bool) -> tuple[RopeSpec, float]:
    """Reads how the rotated part of heads is, and what scores are multiplied by beside it (YaRN's
    factor, which DeepSeek's configs say apart).
    """
    section = rope_section(config)
    if section.get("rope_type") != "proportional":
        # The rotated part stands apart: a share of a head says nothing more of it.
        whole = {"partial_rotary_factor": 1.0}
        config, section = config.replaced(**whole), section.replaced(**whole)
    rope = read_rope(config, section, head_dim=rotated, interleaved=interleaved)
    factor = 1.0
    if rope.kind != "default" and section.get("mscale_all_dim"):
        factor = yarn_mscale(section.number("mscale_all_dim"), section.number("factor")) ** 2
    return replace(rope, dim=rotated), factor


def _leaves(
    config: ConfigReader, spec: ModelSpec, dims: tuple[int, int, int], hidden: int
) -> Mapping[str, Leaf]:
    """Describes the arrays of a layer's attention."""
    (plain, rotated, rank), num_heads = dims, spec.num_heads
    value = config.size("v_head_dim", max(1, hidden // num_heads), at_most=MAX_HEAD)
    prefix, has_biases = f"{LAYER}self_attn.", config.flag("attention_bias", False)

    def matrix(name: str, source: str, shape: tuple[int, int], *axes: str | None) -> None:
        found[name] = leaf(f"{prefix}{source}.weight", shape, axes)

    def biased(name: str, source: str, shape: tuple[int, int], *axes: str | None) -> None:
        matrix(name, source, shape, *axes)
        if has_biases:
            bias = leaf(f"{prefix}{source}.bias", shape[:1], axes[:1])
            found[f"{name}_bias"] = bias

    def norm(name: str, source: str, size: int) -> None:
        found[name] = leaf(f"{prefix}{source}.weight", (size,), (None,))

    found: dict[str, Leaf] = {}
    queries = num_heads * (plain + rotated)
    if config.get("q_lora_rank") is None:
        matrix("q", "q_proj", (queries, hidden), "heads", "model")
    else:
        q_rank = config.size("q_lora_rank", at_most=MAX_HEAD)
        biased("q_down", "q_a_proj", (q_rank, hidden), None, "model")
        norm("q_down_norm", "q_a_layernorm", q_rank)
        matrix("q", "q_b_proj", (queries, q_rank), "heads", None)
    biased("kv_down", "kv_a_proj_with_mqa", (rank + rotated, hidden), None, "model")
    norm("kv_down_norm", "kv_a_layernorm", rank)
    # One tensor has, head by head, what makes its key and what makes its value. Queries go through
    # the former backwards.
    both = Part(shape=(num_heads * (plain + value), rank), num_blocks=num_heads)
    parts = {
        "k_up": (replace(both, stop=plain, by_column=True), (num_heads, rank, plain)),
        "v_up": (replace(both, start=plain), (num_heads, value, rank)),
    }
    for name, (part, shape) in parts.items():
        axes = ("heads", None, None)
        found[name] = leaf(f"{prefix}kv_b_proj.weight", shape, axes, part=part)
    biased("o", "o_proj", (hidden, num_heads * value), "model", "heads")
    if isinstance(index := spec.attention.index, IndexSpec):
        q_rank = hidden if index.of_stream else config.size("q_lora_rank", at_most=MAX_HEAD)
        matrix("index_q", "indexer.wq_b", (index.num_heads * index.head_dim, q_rank), None, None)
        matrix("index_k", "indexer.wk", (index.head_dim, hidden), None, "model")
        matrix("index_weight", "indexer.weights_proj", (index.num_heads, hidden), None, "model")
        norm("index_k_norm", "indexer.k_norm", index.head_dim)
        found["index_k_norm_bias"] = leaf(
            f"{prefix}indexer.k_norm.bias", (index.head_dim,), (None,)
        )
        if index.pool > 1:
            source = f"{prefix}indexer.index_kpool_compress_"
            counts = leaf(f"{source}gate", (index.head_dim, hidden), (None, "model"))
            # A vector here: what no matmul reads is not quantised.
            whole = Part(shape=(index.pool, index.head_dim))
            place = leaf(f"{source}ape", (index.pool * index.head_dim,), (None,), part=whole)
            found |= {"index_counts": counts, "index_place": place}
    return found


def read_index(config: ConfigReader, *, interleaved: bool) -> IndexSpec:
    """Reads how keys are chosen, as DeepSeek-V3.2's configs say it."""
    rotated = config.get("qk_rope_head_dim")
    head_dim = config.size("index_head_dim", 128, at_most=MAX_HEAD)
    if is_int(rotated) and head_dim < rotated:
        raise config.fail("index_head_dim", f"at least the {rotated} of qk_rope_head_dim")
    num_chosen, pool = config.size("index_topk", 2048), config.size("index_kpool", 1)
    if BLOCK % pool:  # pools would lie across the blocks that are read at once
        raise config.fail("index_kpool", f"a divisor of {BLOCK} (nothing else is built)")
    if num_chosen % pool:
        raise config.fail("index_topk", f"a multiple of index_kpool={pool}")
    return IndexSpec(
        num_heads=config.size("index_n_heads", 64, at_most=MAX_HEAD),
        head_dim=head_dim,
        num_chosen=num_chosen,
        pool=pool,
        interleaved=interleaved,
    )


def with_shared(
    found: tuple[ModelSpec, Layout], config: ConfigReader, otherwise: list[int]
) -> tuple[ModelSpec, Layout]:
    """Returns a decoder of which some layers have no index heads: those that the config lists as
    shared, or `otherwise`.
    """
    if not (shared := _shared_layers(config, otherwise)):
        return found
    spec, layout = with_leaves(
        found,
        shared,
        lambda leaves: {x: y for x, y in leaves.items() if not x.startswith(INDEX)},
    )
    if not isinstance(spec.attention.index, IndexSpec):
        raise ValueError("expected a decoder that chooses keys, got one that does not")
    index = replace(spec.attention.index, has_shared=True)
    spec = replace(spec, attention=replace(spec.attention, index=index))
    # Some conversions have the tensors nonetheless.
    unread = rf"model\.layers\.({'|'.join(map(str, shared))})\.self_attn\.indexer\..*"
    return spec, layout.with_unread(unread)


def every_few(config: ConfigReader, num_layers: int) -> list[int]:
    """Lists the layers that share index heads where a config says which by numbers."""
    every, first = config.size("index_topk_freq", 1), config.size("index_skip_topk_offset", 2)
    return [layer for layer in range(num_layers) if max(layer - first + 1, 0) % every]


def _shared_layers(config: ConfigReader, otherwise: list[int]) -> list[int]:
    key = next((x for x in ("indexer_types", "index_topk_pattern") if config.get(x)), None)
    if key is None:
        return otherwise
    if isinstance(config.get(key), str):
        config = config.replaced(**{key: list(config.get(key))})
    kinds = config.kinds(key, config.num_layers, ("full", "shared", "F", "S"))
    shared = [layer for layer, kind in enumerate(kinds) if kind in ("shared", "S")]
    if 0 in shared:
        raise config.fail(key, "a first layer that is full: there is none before it to share with")
    return shared
