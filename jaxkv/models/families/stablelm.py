"""StableLM 2 and 3B: LayerNorms, partly rotated heads, attention and MLP side by side in some.
Source: arXiv 2402.17834.
"""

from __future__ import annotations

from dataclasses import replace

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import QKV, Layout, Names, read_decoder
from jaxkv.models.spec import AttentionSpec, ModelSpec


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    is_parallel, names = config.flag("use_parallel_residual", False), Names()
    if is_parallel:
        names = Names(mlp_norm=None)
    if config.flag("qk_layernorm", False):
        names = replace(
            names,
            q_norm="self_attn.q_layernorm.norms.{head}",
            k_norm="self_attn.k_layernorm.norms.{head}",
        )
    return read_decoder(
        config,
        partly=True,
        names=names,
        biased=(*QKV * config.flag("use_qkv_bias", False), "attn_norm", "mlp_norm", "norm"),
        eps="layer_norm_eps",
        norm="layer",
        is_parallel=is_parallel,
        attention=AttentionSpec(qk_norm="heads"),
    )
