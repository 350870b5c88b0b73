"""Dory: a normalised transformer, whose streams, queries and keys all have length 1, with layers in
the middle that run more than once. Source: nGPT, arXiv 2410.01131, and transformers' dory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from jaxkv.models.config_reader import MAX_LAYERS, ConfigReader
from jaxkv.models.families.base import (
    FULL,
    SLIDING,
    Layout,
    Leaf,
    Names,
    attn_biased,
    leaf,
    mlp_biased,
    read_decoder,
)
from jaxkv.models.families.hybrid import with_leaves
from jaxkv.models.rope_config import read_layer_ropes
from jaxkv.models.spec import AttentionSpec, ModelSpec, NormedStream, Pass, Scales

LAYER, MLP = "backbone.layers.{layer}.", "mlp"
NAMES = Names(embed="backbone.embeddings", norm=None, layer=LAYER, attn_norm=None, mlp_norm=None)
UNIT = ("attn_norm", "post_attn_norm", "mlp_norm", "post_mlp_norm", "norm")
UNIT_WITHIN = ("q_norm", "k_norm", "o_norm", "down_norm")
ROPES = {
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": "default", "rope_theta": 1e7},
}
EPS = 1e-6


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    config, kinds = _in_pairs(config)
    order, passes = _order(config, len(kinds))
    kinds_run = [kinds[layer] for layer in order]
    if config.get("rope_parameters") is None:
        config = config.replaced(rope_parameters=ROPES)
    hidden, init = config.size("hidden_size"), config.number("initializer_range", 0.0177)
    rate = config.number("ngpt_alpha_init", 0.05) / init
    spec, layout = read_decoder(
        config.replaced(num_hidden_layers=len(order)),
        names=NAMES,
        biased=(*attn_biased(config), *mlp_biased(config)),
        kinds=kinds_run,
        ropes=read_layer_ropes(config, kinds_run),
        eps=None,
        norm="length",
        unit_norms=(*UNIT, *UNIT_WITHIN),
        attention=AttentionSpec(
            scale=config.head_dim**0.5 / init**2, gate_factor=hidden**0.5 / init**2
        ),
        scales=Scales(
            stream=NormedStream(mixer=((1.0, rate),) * 2, mlp=(1.0, rate)),
            gate=hidden**0.5,
            logits=1 / init,
            passes=passes,
        ),
    )
    spec = replace(spec, norm_eps=EPS)
    layout = layout.in_each_layer(**_leaves(spec, layout.layers[0]))
    gain = leaf("lm_head.logit_scale", (spec.vocab_size,), ("vocab",))
    again = [layer for layer, number in enumerate(order) if order.count(number) > 1]
    spec, layout = with_leaves((spec, layout.with_top(head_gain=gain)), again, dict)
    return spec, replace(layout, numbers=tuple(order), spellings=_spellings(len(kinds)))


def _in_pairs(config: ConfigReader) -> tuple[ConfigReader, list[str]]:
    """Returns the config with attention and the MLP behind it counted as one layer, which files
    count as two, and what each layer sees.
    """
    num_layers, given = config.num_layers, config.get("layer_types")
    if not isinstance(given, list) or MLP not in given:
        otherwise = [SLIDING if (i + 1) % 4 else FULL for i in range(num_layers)]
        return config, config.kinds("layer_types", num_layers, (FULL, SLIDING), otherwise)
    kinds = config.kinds("layer_types", num_layers, (FULL, SLIDING, MLP))
    if num_layers % 2 or MLP in kinds[::2] or set(kinds[1::2]) != {MLP}:
        raise config.fail("layer_types", "attention and mlp by turns")
    halved = {"num_hidden_layers": num_layers // 2, "layer_types": kinds[::2]}
    for key in ("n_input_layers", "n_recurrent_layers", "n_output_layers"):
        if config.get(key) is not None:
            halved[key] = config.size(key, at_least=0) // 2
    return config.replaced(**halved), kinds[::2]


def _order(config: ConfigReader, num_layers: int) -> tuple[list[int], tuple[Pass, ...]]:
    """Lists the layers in the order in which they run, and says where passes begin."""
    first, last = (config.size(f"n_{one}_layers", 8, at_least=0) for one in ("input", "output"))
    count = config.size("n_recurrent_layers", num_layers - first - last)
    if first + count + last != num_layers:
        raise config.fail("n_recurrent_layers", f"{num_layers} layers with input and output ones")
    loops = config.size("n_recurrent_loops", 2, at_most=MAX_LAYERS)
    if loops > 1:  # with others earlier passes see what the last one stored
        config.refuse("recurrent_kv_cache_mode", "per_loop")
    if first + count * loops + last > MAX_LAYERS:
        raise config.fail("n_recurrent_loops", f"at most {MAX_LAYERS} layers in all passes")
    order = [*range(first), *list(range(first, first + count)) * loops]
    order += range(first + count, num_layers)
    starts = [first + count * i for i in range(loops)]
    return order, tuple(
        Pass(layer=at, joins=0, keeps=None if i else 0) for i, at in enumerate(starts)
    )


def _leaves(spec: ModelSpec, leaves: Mapping[str, Leaf]) -> dict[str, Leaf]:
    """Describes the vectors of a layer, and its gate of attention."""
    hidden, size, ffn = spec.hidden_size, leaves["q"].info.shape[0], leaves["up"].info.shape[0]

    def vector(source: str, width: int, axis: str) -> Leaf:
        return leaf(LAYER + source, (width,), (axis,))

    return {
        "attn_gate": leaf(f"{LAYER}self_attn.g_proj.weight", (size, hidden), ("heads", "model")),
        "attn_gate_root": vector("self_attn.s_gate", size, "heads"),
        "q_root": vector("self_attn.sqk", size, "heads"),
        "gate_gain": vector("mlp.suv_gate", ffn, "ffn"),
        "up_gain": vector("mlp.suv_up", ffn, "ffn"),
        "attn_rate": vector("lambda_1", hidden, "model"),
        "mlp_rate": vector("lambda_2", hidden, "model"),
    }


def _spellings(num_layers: int) -> tuple[tuple[str, str], ...]:
    """Returns how published files call tensors, in which attention and the MLP behind it are two
    layers, and how transformers does.
    """
    found = [
        (r"^model\.", "backbone."),
        (r"\.embed_tokens\.", ".embeddings."),
        (r"\.self_attn\.gate_proj\.", ".self_attn.g_proj."),
    ]
    for i in range(num_layers):
        for number, part, own, rate in (
            (2 * i, "attn", "self_attn", "lambda_1"),
            (2 * i + 1, "mlp", "mlp", "lambda_2"),
        ):
            found += [
                (rf"\.layers\.{number}\.mixer\.", f".layers.{i}.{own}."),
                (rf"\.layers\.{number}\.{part}_alpha$", f".layers.{i}.{rate}"),
            ]
    return (*found, (r"\.self_attn\.gate_proj\.", ".self_attn.g_proj."))
