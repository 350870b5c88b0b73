"""The text part of North Micro Vision: Command R with windows and rotary embeddings by the kind of
layer, which may rotate nothing; for text alone. Source: transformers' cohere_compass.
"""

from __future__ import annotations

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import FULL, SLIDING, Layout, Names, attn_biased, read_decoder
from jaxkv.models.rope_config import read_layer_ropes
from jaxkv.models.spec import ModelSpec, RopeSpec, Scales


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    num_layers = config.num_layers
    kinds = config.kinds("layer_types", num_layers, (FULL, SLIDING), [FULL] * num_layers)
    return read_decoder(
        config,
        names=Names(mlp_norm=None),
        biased=attn_biased(config),
        kinds=kinds,
        ropes=_ropes(config, kinds),
        eps="layer_norm_eps",
        norm="layer",
        is_parallel=True,
        scales=Scales(logits=config.number("logit_scale", 1.0)),
    )


def _ropes(config: ConfigReader, kinds: list[str]) -> list[RopeSpec | None]:
    """Reads the embedding of each layer, None for a kind that has null in place of a section."""
    sections = config.section("rope_parameters").values
    unrotated = {kind for kind in kinds if kind in sections and sections[kind] is None}
    rotated = [kind for kind in kinds if kind not in unrotated]
    of_kind = dict(zip(rotated, read_layer_ropes(config, rotated), strict=True))
    return [of_kind.get(kind) for kind in kinds]
