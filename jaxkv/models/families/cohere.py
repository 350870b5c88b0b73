"""Command R: attention and MLP side by side behind one LayerNorm without bias. Source: the model's
card, CohereLabs/c4ai-command-r-v01.
"""

from __future__ import annotations

from dataclasses import replace

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import Layout, Names, attn_biased, read_decoder
from jaxkv.models.spec import AttentionSpec, ModelSpec, Scales


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    names = Names(mlp_norm=None)
    if config.flag("use_qk_norm", False):
        names = replace(names, q_norm="self_attn.q_norm", k_norm="self_attn.k_norm")
    spec, layout = read_decoder(
        config,
        names=names,
        biased=attn_biased(config),
        interleaved=True,
        eps="layer_norm_eps",
        norm="layer",
        is_parallel=True,
        scales=Scales(logits=config.number("logit_scale", 0.0625)),
        attention=AttentionSpec(qk_norm="heads"),
    )
    # What the first files have beside a shorter max_position_embeddings; as in vLLM.
    return replace(spec, max_len=config.size("model_max_length", spec.max_len)), layout
