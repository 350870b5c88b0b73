"""DiffLlama: Llama with attention that is the difference of two. Source: arXiv 2410.05258."""

from __future__ import annotations

from dataclasses import replace

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.differential import FIRST, SECOND
from jaxkv.models.families.base import (
    LAYER,
    QKV,
    Layout,
    Leaf,
    Part,
    attn_biased,
    leaf,
    read_decoder,
)
from jaxkv.models.spec import AttentionSpec, ModelSpec


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    spec, layout = read_decoder(
        config,
        biased=attn_biased(config),
        attention=AttentionSpec(scale=config.head_dim**-0.5),
    )
    (group,), head_dim = spec.groups, spec.head_dim
    if group.num_kv_heads % 2:
        raise config.fail("num_key_value_heads", "an even number, as heads are in pairs")
    pairs = replace(group, num_kv_heads=group.num_kv_heads // 2, head_dim=2 * head_dim)
    leaves = {
        name: _in_pairs(one, head_dim) if name.removesuffix("_bias") in QKV else one
        for name, one in layout.layers[0].items()
    }
    names = zip((*FIRST, *SECOND), ("q1", "k1", "q2", "k2"), strict=True)
    leaves |= {
        name: leaf(f"{LAYER}self_attn.lambda_{own}", (head_dim,), ("head_dim",))
        for name, own in names
    }
    rope = replace(spec.rope, dim=head_dim)  # of each head of a pair
    return replace(spec, groups=(pairs,), rope=rope), replace(layout, layers=(leaves,))


def _in_pairs(one: Leaf, head_dim: int) -> Leaf:
    """Describes rows by head, of which the first half are the first ones of pairs: a pair's second
    one comes behind its first one.
    """
    return replace(one, part=Part(shape=one.info.shape, num_blocks=2, turn=head_dim))
