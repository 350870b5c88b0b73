"""The text part of Llama 3.2 Vision: Llama 3.1, without the layers between that read pictures,
which text alone does not go through. Source: arXiv 2407.21783, section 7.
"""

from __future__ import annotations

from dataclasses import replace

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families import llama
from jaxkv.models.families.base import Layout, Part
from jaxkv.models.spec import ModelSpec

OF_PICTURES = range(3, 40, 5)
"""Layers that read pictures, where a config does not say which."""

MORE_TOKENS = 8
"""Embeddings behind the vocabulary's: of a picture, and empty ones."""


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    total = config.num_layers
    left_out = config.whole_numbers("cross_attention_layers", list(OF_PICTURES))
    kept = [layer for layer in range(total) if layer not in left_out]
    if not kept:
        raise config.fail("cross_attention_layers", f"fewer than the {total} of num_hidden_layers")
    text = config.replaced(num_hidden_layers=len(kept))
    spec, layout = llama.read(text)
    embed = layout.top["embed"]
    stored = Part(shape=(spec.vocab_size + MORE_TOKENS, spec.hidden_size), stop=spec.vocab_size)
    # One name after the other, so that none has two numbers on its way.
    numbered = [
        (rf"\.layers\.{layer}\.", f".layers.{number}.")
        for number, layer in enumerate(kept)
        if layer != number
    ]
    others = "|".join(str(layer) for layer in range(total) if layer not in kept) or "none"
    layout = replace(
        layout.with_top(embed=replace(embed, part=stored)).with_unread(r"pictures\..*"),
        spellings=((rf"^model\.layers\.({others})\.", r"pictures.\1."), *numbered),
    )
    return spec, layout
