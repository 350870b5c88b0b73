"""K-EXAONE: the windows of EXAONE 4 with norms in front, and the experts of DeepSeek V3. Source:
arXiv 2601.01739.
"""

from __future__ import annotations

from dataclasses import replace

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import QK_NORMED, Layout, read_decoder
from jaxkv.models.families.exaone4 import read_kinds_and_ropes
from jaxkv.models.families.experts import first_dense, listed_dense, read_grouped
from jaxkv.models.spec import ModelSpec


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    kinds, ropes = read_kinds_and_ropes(config)
    own_names = {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"}
    experts, router = read_grouped(config.renamed(**own_names))
    return read_decoder(
        config,
        names=QK_NORMED,
        kinds=kinds,
        ropes=ropes,
        experts=replace(experts, bias="mlp.e_score_correction_bias").leaves,
        is_dense=listed_dense(config, first_dense(config)),
        router=router,
    )
