"""Kimi Linear: Kimi delta attention, latent attention without rotation in every fourth layer, and
experts as DeepSeek V3 chooses them. Source: arXiv 2510.26692.
"""

from __future__ import annotations

from dataclasses import replace

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import FULL, LAYER, Layout, Leaf, Part, leaf
from jaxkv.models.families.delta import (
    CHANNELS,
    CONV_ACTIVATIONS,
    LINEAR,
    low_rank_leaves,
    read_kimi_delta,
)
from jaxkv.models.families.experts import first_dense, listed_dense, read_grouped
from jaxkv.models.families.hybrid import with_mixer
from jaxkv.models.families.latent import read_latent
from jaxkv.models.recurrent import GatedDelta
from jaxkv.models.spec import ModelSpec

PREFIX = f"{LAYER}self_attn."
RENAMED = {
    "max_position_embeddings": "model_max_length",
    "n_group": "num_expert_group",
    "n_routed_experts": "num_experts",
    "n_shared_experts": "num_shared_experts",
    "norm_topk_prob": "moe_renormalize",
    "num_experts_per_tok": "num_experts_per_token",
}


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    config = config.renamed(**RENAMED)
    config.refuse("mla_use_nope", True)
    experts, router = read_grouped(config)
    dense = first_dense(config.with_defaults({"first_k_dense_replace": 1}))
    found = read_latent(
        config,
        rotates=False,
        activations=CONV_ACTIVATIONS,
        experts=replace(experts, gate="w1", up="w3", down="w2").leaves,
        router=router,
        is_dense=listed_dense(config, dense),
    )
    mixer = read_kimi_delta(config)
    leaves = _leaves(mixer, found[0].hidden_size)
    spec, layout = with_mixer(found, _linear_layers(config), mixer, leaves)
    return spec, replace(layout, spellings=((r"\.block_sparse_moe\.", ".mlp."),))


def _linear_layers(config: ConfigReader) -> list[int]:
    """Lists the layers with delta attention: by `layer_types`, or by published configs' own lists,
    which count from 1.
    """
    num_layers, own = config.num_layers, config.section("linear_attn_config")
    if config.get("layer_types") is not None:
        kinds = config.kinds("layer_types", num_layers, (FULL, LINEAR))
        linear = [layer for layer, kind in enumerate(kinds) if kind == LINEAR]
    elif own.get("kda_layers") is not None:
        listed = own.whole_numbers("kda_layers", at_least=1, at_most=num_layers)
        linear = [one - 1 for one in listed]
    else:
        linear = [layer for layer in range(num_layers) if not layer or layer % 4]
    return linear


def _leaves(mixer: GatedDelta, hidden: int) -> dict[str, Leaf]:
    stored = Part(shape=(1, 1, mixer.num_heads, 1))
    rate = leaf(f"{PREFIX}A_log", (mixer.num_heads,), (CHANNELS,), part=stored)
    return low_rank_leaves(mixer, PREFIX, hidden) | {"delta_rate": rate}
