"""Gemma 3n: several streams, of which layers compute on the first, blocks with a map of low rank
beside them, gates of which the largest count, and Gemma 4's inputs of each layer's own and layers
that attend to what others stored. Source: the model's card, google/gemma-3n-E4B-it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import NormalDist
from typing import NamedTuple

from jaxkv.config import is_int
from jaxkv.models.altup import JOIN, ROUTER, SPREAD
from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import (
    LAYER,
    Layout,
    Leaf,
    attn_biased,
    leaf,
    read_decoder,
    read_forms,
    read_kinds,
)
from jaxkv.models.families.gemma3_text import read_window_ropes
from jaxkv.models.families.gemma4_text import (
    NAMES,
    OF_KEYS,
    own_inputs,
    read_sources,
    unused_keys,
    with_sources,
)
from jaxkv.models.spec import AttentionSpec, ModelSpec, Scales

MAX_STREAMS = 64


class Form(NamedTuple):
    """Says in what layers differ: whether they attend to another's keys and values, how wide their
    MLP is, and `Scales.gate_cutoffs`.
    """

    is_shared: bool
    width: int
    cutoff: float | None


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    config.refuse("altup_active_idx", 0)
    num_layers = config.num_layers
    kinds = read_kinds(config, every=5)
    sources = read_sources(config, kinds)
    widths, cutoffs = _widths(config, num_layers), _cutoffs(config, num_layers)
    forms = [
        Form(source != layer, widths[layer], cutoffs[layer]) for layer, source in enumerate(sources)
    ]
    spec, layout = read_forms(forms, lambda form: _read_form(config, form, kinds))
    listed = tuple(form.cutoff for form in dict.fromkeys(forms))
    scales = replace(spec.scales, gate_cutoffs=listed if any(cutoffs) else ())
    spec = replace(with_sources(spec, sources), scales=scales)
    own_top, own_layer = own_inputs(config, num_layers)
    streams_top, streams_layer = _streams(config)
    own_layer |= streams_layer | _laurel(config)
    layout = layout.in_each_layer(**own_layer).with_top(**own_top, **streams_top)
    return spec, layout.with_unread(
        *unused_keys(sources),  # transformers drops what shared layers would have
        r"model\.layers\.\d+\.altup\.correct_output_scale",  # there even where it is not used
    )


def _read_form(config: ConfigReader, form: Form, kinds: list[str]) -> tuple[ModelSpec, Layout]:
    """Reads the layers of one form as if they were the whole model."""
    spec, layout = read_decoder(
        config.replaced(intermediate_size=form.width),
        names=NAMES,
        biased=attn_biased(config),
        kinds=kinds,
        ropes=read_window_ropes(
            config, kinds, theta=1e6, local=config.number("rope_local_base_freq", 1e4)
        ),
        activation="hidden_activation",
        scales=Scales(
            embed=config.size("hidden_size") ** 0.5,
            embed_is_rounded=True,
            logit_cap=config.cap("final_logit_softcapping"),
        ),
        unit_norms=("v_norm",),
        attention=AttentionSpec(scale=1.0),
    )
    left_out = OF_KEYS if form.is_shared else ()
    leaves = {name: one for name, one in layout.layers[0].items() if name not in left_out}
    return spec, replace(layout, layers=(leaves,))


def _widths(config: ConfigReader, num_layers: int) -> Sequence[int]:
    """Reads the feed-forward dimension of each layer."""
    key, given = "intermediate_size", config.get("intermediate_size")
    if not isinstance(given, list):
        return [config.size(key)] * num_layers
    if len(given) != num_layers:
        raise config.fail(key, f"a number, or a list of {num_layers}")
    return [config.replaced(**{key: one}).size(key) for one in given]


def _cutoffs(config: ConfigReader, num_layers: int) -> Sequence[float | None]:
    """Reads the part of each layer's gates that is cut off, and returns how many standard
    deviations above the mean of normally distributed ones that is.
    """
    key = "activation_sparsity_pattern"
    num_sparse = 10 if num_layers > 10 else 0
    parts = config.get(key, [0.95] * num_sparse + [0.0] * (num_layers - num_sparse))
    if (
        not isinstance(parts, list)
        or len(parts) != num_layers
        or not all((is_int(one) or isinstance(one, float)) and 0 <= one < 1 for one in parts)
    ):
        raise config.fail(key, f"a list of {num_layers} numbers from 0 to less than 1")
    return [NormalDist().inv_cdf(one) if one else None for one in parts]


def _streams(config: ConfigReader) -> tuple[dict[str, Leaf], dict[str, Leaf]]:
    """Lists the tensors that make streams and join them, and those of a layer that weigh them."""
    hidden, layer = config.size("hidden_size"), f"{LAYER}altup."
    count = config.size("altup_num_inputs", at_least=2, at_most=MAX_STREAMS)
    top = {
        name.format(i + 1): leaf(f"model.{source}.{i}.weight", (hidden, hidden), (None, "model"))
        for name, source in ((SPREAD, "altup_projections"), (JOIN, "altup_unembed_projections"))
        for i in range(count - 1)
    }
    own = {
        ROUTER: leaf(f"{layer}modality_router.weight", (count, hidden), ("streams", "model")),
        "altup_norm": leaf(f"{layer}router_norm.weight", (hidden,), ("model",)),
    }
    for name, source, rows in (
        ("altup_predict", "prediction_coefs", count**2),
        ("altup_correct", "correction_coefs", count),
    ):
        own[name] = leaf(f"{layer}{source}.weight", (rows, count), ("streams", "streams"))
    if config.flag("altup_correct_scale", True):
        own["altup_scale"] = leaf(f"{layer}correct_output_scale", (hidden,), ("model",))
    return top, own


def _laurel(config: ConfigReader) -> dict[str, Leaf]:
    """Lists the tensors of the map beside a layer's attention."""
    hidden, rank = config.size("hidden_size"), config.size("laurel_rank")
    layer = f"{LAYER}laurel."
    return {
        "laurel_down": leaf(f"{layer}linear_left.weight", (rank, hidden), (None, "model")),
        "laurel_up": leaf(f"{layer}linear_right.weight", (hidden, rank), ("model", None)),
        "laurel_norm": leaf(f"{layer}post_laurel_norm.weight", (hidden,), ("model",)),
    }
