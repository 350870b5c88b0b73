"""GLM-5.3-Flash: several streams, Kimi delta attention whose decays have a least, in every fourth
layer latent attention without rotation that chooses keys by pools, and experts as DeepSeek V3
chooses them. Source: the model's card, zai-org/GLM-5.3-Flash.
"""

from __future__ import annotations

from dataclasses import replace

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import FULL, LAYER, Layout
from jaxkv.models.families.delta import (
    CONV_ACTIVATIONS,
    LINEAR,
    low_rank_leaves,
    read_kimi_delta,
    read_least,
)
from jaxkv.models.families.experts import listed_dense, read_grouped
from jaxkv.models.families.hybrid import with_mixer
from jaxkv.models.families.latent import read_index, read_latent
from jaxkv.models.families.streams import connections, read_mixed_streams
from jaxkv.models.spec import GateLimits, ModelSpec, Scales

INDEXED = ("indexed_attention", "deepseek_sparse_attention", FULL)
LEAST_DECAY = -5.0


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    num_layers = config.num_layers
    for key, harmless in (
        ("mla_use_nope", True),
        ("qk_rope_head_dim", 0),
        ("index_kpool_compress", True),
        ("index_kpool_always_select_tail", True),
        ("indexer_types", ["full"] * num_layers),
        ("index_topk_freq", 1),
        ("index_topk_pattern", "F" * num_layers),
    ):
        config.refuse(key, harmless)
    experts, router = read_grouped(config)
    hyper = read_mixed_streams(config)
    of_all = (config.number("swiglu_limit", 10.0),) * num_layers
    found = read_latent(
        config,
        rotates=False,
        activations=CONV_ACTIVATIONS,
        experts=experts.leaves,
        router=router,
        is_dense=listed_dense(config, range(min(3, num_layers))),
        index=read_index(config, interleaved=True),
        scales=Scales(limits=GateLimits(dense=of_all, routed=of_all, shared=of_all), hyper=hyper),
    )
    hidden = found[0].hidden_size
    mixer = replace(read_kimi_delta(config), least_decay=_least_decay(config))
    prefix = f"{LAYER}self_attn."
    linear = _linear_layers(config, num_layers)
    spec, layout = with_mixer(found, linear, mixer, low_rank_leaves(mixer, prefix, hidden))
    own = connections(hyper, hidden, ("hc_attn_", "hc_ffn_"))
    # A layer behind the last predicts later tokens, of which configs need say nothing.
    layout = layout.in_each_layer(**own).with_unread(rf"model\.layers\.{num_layers}\..*")
    # In other families the norms inside of latent attention have an eps of their own.
    attention = replace(spec.attention, latent_eps=spec.norm_eps)
    return replace(spec, attention=attention), layout


def _least_decay(config: ConfigReader) -> float:
    """Reads the least decay, 0.0 for none: that is what null says, but where there is a section
    whose gate is safe, as it is where nothing is said of it.
    """

    def read(given: ConfigReader, key: str, otherwise: float) -> float:
        is_null = given.values.get(key, otherwise) is None
        return 0.0 if is_null else read_least(given, key, otherwise)

    found = read(config, "linear_lower_bound", LEAST_DECAY)
    if config.get("linear_attn_config") is None:
        return found
    own = config.section("linear_attn_config")
    if "gate_lower_bound" in own.values:
        found = read(own, "gate_lower_bound", LEAST_DECAY)
    return LEAST_DECAY if not found and own.flag("safe_gate", True) else found


def _linear_layers(config: ConfigReader, num_layers: int) -> list[int]:
    otherwise = [LINEAR if layer % 4 != 3 else FULL for layer in range(num_layers)]
    kinds = config.kinds("layer_types", num_layers, (LINEAR, *INDEXED), otherwise)
    return [layer for layer, kind in enumerate(kinds) if kind == LINEAR]
