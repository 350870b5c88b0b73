"""DeepSeek V2 and V2-Lite: latent attention, and experts chosen by softmax, in groups or among all.
Source: arXiv 2405.04434.
"""

from __future__ import annotations

from dataclasses import replace

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import Layout
from jaxkv.models.families.experts import first_dense, read_grouped
from jaxkv.models.families.latent import read_latent
from jaxkv.models.spec import ModelSpec

ALL, GROUPS = "greedy", "group_limited_greedy"


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    config.refuse("mlp_bias", False)
    # Weights are never normalised, whatever `norm_topk_prob` says: so in transformers.
    config = config.replaced(norm_topk_prob=False)
    if config.choice("topk_method", ALL, (ALL, GROUPS)) == ALL:
        config = config.replaced(n_group=1, topk_group=1)
    experts, router = read_grouped(config)
    return read_latent(
        config,
        interleaved=True,
        experts=replace(experts, bias=None).leaves,
        is_dense=first_dense(config),
        router=replace(router, score="softmax", by_two=False),
    )
