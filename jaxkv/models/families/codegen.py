"""CodeGen: GPT-J with queries, values and keys in one tensor, in the four parts that it was trained
in. Source: arXiv 2203.13474.
"""

from __future__ import annotations

from dataclasses import replace

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families import gptj
from jaxkv.models.families.base import Layout, Part
from jaxkv.models.spec import ModelSpec

NUM_PARTS = 4


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    hidden = config.size("n_embd")
    if hidden % NUM_PARTS:
        raise config.fail("n_embd", f"a multiple of {NUM_PARTS}")
    spec, layout = gptj.read(config)
    size, layer = hidden // NUM_PARTS, dict(layout.layers[0])
    for place, name in enumerate(("q", "v", "k")):
        part = Part((3 * hidden, hidden), NUM_PARTS, place * size, (place + 1) * size)
        source = "transformer.h.{layer}.attn.qkv_proj.weight"
        layer[name] = replace(layer[name], source=source, part=part)
    masks = r"transformer\.h\.\d+\.attn\.causal_mask"
    return spec, replace(layout, layers=(layer,)).with_unread(masks)
