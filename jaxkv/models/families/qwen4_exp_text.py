"""The text part of Qwen4-Exp: Qwen3.5's layers with experts between gated streams, to which some
add what n-grams say, and whose attention chooses pools of keys. Source: transformers' qwen4_exp.
"""

from __future__ import annotations

from dataclasses import replace

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import FULL, LAYER, QK_NORMED, Layout, leaf
from jaxkv.models.families.delta import LINEAR, read_linear_layers
from jaxkv.models.families.hybrid import rows_of, with_leaves
from jaxkv.models.families.latent import MAX_HEAD
from jaxkv.models.families.ngrams import read_ngrams, with_ngrams
from jaxkv.models.families.qwen3_5_text import in_turn
from jaxkv.models.families.qwen3_next import read_qwen_hybrid
from jaxkv.models.families.streams import gated_connections, gates, read_gated_streams
from jaxkv.models.hyper import JOIN
from jaxkv.models.recurrent.delta import GATES
from jaxkv.models.spec import AttentionSpec, IndexSpec, ModelSpec, Scales
from jaxkv.ops.attention.sweep import BLOCK

INDEXED = "indexed_attention"
NAMES = replace(QK_NORMED, norm=None, attn_norm=None, mlp_norm=None)


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    num_layers = config.num_layers
    config = config.replaced(intermediate_size=config.size("moe_intermediate_size"))
    if config.get("layer_types") is not None:
        kinds = config.kinds("layer_types", num_layers, (LINEAR, INDEXED, FULL))
        config = config.replaced(layer_types=[FULL if x == INDEXED else x for x in kinds])
    linear = read_linear_layers(config, every=config.size("full_attention_interval", 4))
    index = _index(config) if len(linear) < num_layers else None
    hyper = read_gated_streams(config)
    rank = config.size("hc_lowrank", 320, at_most=MAX_HEAD)
    spec, layout = read_qwen_hybrid(
        config,
        matrices=in_turn,
        is_normalised=config.flag("norm_topk_prob", True),
        is_dense=(),
        names=NAMES,
        gate=config.choice("output_gate_type", config.get("hidden_act", "silu"), tuple(GATES)),
        scales=Scales(hyper=hyper),
        attention=AttentionSpec(index=index),
    )
    if index is not None:
        spec, layout = _with_index(config, (spec, layout), index)
    own = gated_connections(hyper, rank, spec.hidden_size)
    top = gates(hyper, rank, spec.hidden_size, JOIN, "model.hyper_connection_mixer.")
    layout = layout.in_each_layer(**own).with_top(**top)
    keepers = read_ngrams(config, linear, channels=hyper.num_streams * spec.hidden_size)
    for layer, keeper in keepers.items():
        spec, layout = with_ngrams(config, (spec, layout), layer, keeper)
    return spec, layout


def _index(config: ConfigReader) -> IndexSpec:
    """Reads how attention chooses pools of keys: transformers has no layers that attend to all."""
    pool, num_chosen = config.size("indexer_compress_ratio"), config.size("indexer_budget")
    if BLOCK % pool:  # pools would lie across the blocks that are read at once
        raise config.fail("indexer_compress_ratio", f"a divisor of {BLOCK} (nothing else is built)")
    if num_chosen % pool:
        raise config.fail("indexer_budget", f"a multiple of indexer_compress_ratio={pool}")
    if config.size("indexer_kv_heads") != 1:
        raise config.fail("indexer_kv_heads", "1")
    return IndexSpec(
        num_heads=config.size("indexer_n_heads", at_most=MAX_HEAD),
        head_dim=config.size("indexer_head_dim", at_most=MAX_HEAD),
        num_chosen=num_chosen,
        pool=pool,
        interleaved=False,
    )


def _with_index(
    config: ConfigReader, found: tuple[ModelSpec, Layout], index: IndexSpec
) -> tuple[ModelSpec, Layout]:
    """Returns the decoder with index heads in the layers that attend."""
    spec, _ = found
    (group,), rotated = spec.groups, spec.rope.dim or spec.head_dim
    if not rotated <= index.head_dim <= spec.head_dim:
        expected = f"from the {rotated} that are rotated to the {spec.head_dim} of head_dim"
        raise config.fail("indexer_head_dim", expected)
    if spec.depends_on_context:
        expected = "a rotation that does not depend on how long a sequence gets (not built)"
        raise config.fail("rope_parameters", expected)
    prefix, dim = f"{LAYER}self_attn.indexer.", index.head_dim
    sizes = {"index_q": index.num_heads * dim, "index_k": dim}
    own = rows_of(
        f"{prefix}index_qk_proj.weight", sizes, spec.hidden_size, dict.fromkeys(sizes, None)
    )
    for name in "qk":
        own[f"index_{name}_norm"] = leaf(f"{prefix}{name}_layernorm.weight", (dim,), (None,))
    spec, layout = with_leaves(found, group.layers, lambda leaves: {**leaves, **own})
    return replace(spec, groups=(replace(group, has_index_key=True),)), layout
