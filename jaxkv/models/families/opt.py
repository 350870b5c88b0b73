"""OPT: learned positions that begin at the third, LayerNorms before blocks, or of what they join;
embeddings that may be smaller than the stream. Source: arXiv 2205.01068.
"""

from __future__ import annotations

from dataclasses import replace

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import QKV, Layout, Leaf, Names, Part, leaf, read_decoder
from jaxkv.models.spec import ModelSpec

NAMES = Names(
    embed="model.decoder.embed_tokens",
    norm="model.decoder.final_layer_norm",
    layer="model.decoder.layers.{layer}.",
    attn_norm="self_attn_layer_norm",
    mlp_norm="final_layer_norm",
    o="self_attn.out_proj",
    gate=None,
    up="fc1",
    down="fc2",
)
FIRST = 2
"""The row of the first position."""


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    is_before = config.flag("do_layer_norm_before", True)
    if is_before:
        config.refuse("_remove_final_layer_norm", False)
    biased: tuple[str, ...] = ("attn_norm", "mlp_norm", "norm")
    if not config.flag("layer_norm_elementwise_affine", True):
        raise config.fail(
            "layer_norm_elementwise_affine", "true (norms without weights: not built)"
        )
    biased += (*QKV, "o", "up", "down") * config.flag("enable_bias", True)
    spec, layout = read_decoder(
        config.renamed(intermediate_size="ffn_dim").replaced(num_key_value_heads=None),
        names=NAMES if is_before else replace(NAMES, norm=None),
        biased=biased,
        ropes=[None] * config.num_layers,
        eps=None,
        activation="activation_function",
        norm="layer",
    )
    table = positions("model.decoder.embed_positions", spec)
    layout = layout.with_top(positions=table, **_projections(config, spec, layout))
    return spec, layout if is_before else with_norms_behind(layout)


def with_norms_behind(layout: Layout) -> Layout:
    """Returns a layout whose norms before blocks are of the stream that a block has joined."""

    def renamed(name: str) -> str:
        return f"joined_{name}" if name.startswith(("attn_norm", "mlp_norm")) else name

    layers = ({renamed(name): one for name, one in of.items()} for of in layout.layers)
    return replace(layout, layers=tuple(layers))


def _projections(config: ConfigReader, spec: ModelSpec, layout: Layout) -> dict[str, Leaf]:
    """Lists the tensors that take smaller embeddings to the stream and back, and those embeddings;
    none where they are of its size.
    """
    hidden, size = spec.hidden_size, config.size("word_embed_proj_dim", spec.hidden_size)
    if size == hidden:
        return {}
    shape, axes = (spec.vocab_size, size), ("vocab", None)
    found = {
        name: leaf(one.source, shape, axes, same_as=one.same_as)
        for name, one in layout.top.items()
        if name in ("embed", "head")
    }
    up, down = (f"model.decoder.project_{way}.weight" for way in ("in", "out"))
    found["embed_up"] = leaf(up, (hidden, size), ("model", None))
    found["head_down"] = leaf(down, (size, hidden), (None, "model"))
    return found


def positions(name: str, spec: ModelSpec) -> Leaf:
    """Describes the embeddings of positions, the first of which is in row FIRST."""
    shape = (spec.max_len, spec.hidden_size)
    part = Part(shape=(spec.max_len + FIRST, spec.hidden_size), start=FIRST)
    return leaf(f"{name}.weight", shape, (None, "model"), part=part)
