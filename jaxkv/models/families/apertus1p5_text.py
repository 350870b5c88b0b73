"""The text part of Apertus 1.5: Apertus, whose head may have no rows for what only stands for
images and sounds. Source: the model's card, swiss-ai/Apertus-1.5.
"""

from __future__ import annotations

from dataclasses import replace

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families import apertus
from jaxkv.models.families.base import Layout, Part
from jaxkv.models.spec import ModelSpec


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    """Reads the vocabulary of the head: what cannot be drawn is not in prompts of text either."""
    count = config.size("vocab_size")
    kept = config.size("output_vocab_size", count, at_most=count)
    if config.flag("tie_word_embeddings", False):
        kept = count  # a head that is the embedding has all of its rows
    spec, layout = apertus.read(config.replaced(vocab_size=kept))
    embed = layout.top["embed"]
    if kept < count:
        embed = replace(embed, part=Part(shape=(count, spec.hidden_size), stop=kept))
    return spec, layout.with_top(embed=embed)
