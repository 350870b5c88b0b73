"""Describes the layer behind the last one, which predicts the token after the next (multi-token
prediction), as checkpoints of DeepSeek V3 and V3.2, GLM-4.5, GLM-4.7-Flash and GLM-5 have it.
Source: arXiv 2412.19437, section 2.2.
"""

from __future__ import annotations

from dataclasses import replace

from jaxkv.models.families.base import Layout, leaf
from jaxkv.models.spec import ModelSpec

PREDICTING = ("deepseek_v3", "deepseek_v32", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa")
"""Families whose layers of this kind are known to be called and computed so."""


def read_predictor(spec: ModelSpec, layout: Layout) -> tuple[ModelSpec, Layout]:
    """Returns spec and layout of the first layer behind the last, as a model of that layer alone
    (`models.predictor`). Its block is like the model's last one.

    Embeddings and head are the model's: copies of them that the checkpoint has are leaves only if
    they are not equal.
    """
    last, hidden, vocab = spec.num_layers - 1, spec.hidden_size, spec.vocab_size
    kind = spec.layer_kinds[last] if spec.layer_kinds else 0
    group = spec.groups[spec.group_of(last)[0]]
    prefix = f"model.layers.{spec.num_layers}."
    embed, head = layout.top["embed"], layout.top["head"]
    head = head if head.same_as is None else embed
    vector = ((hidden,), ("model",))
    matrix = ((vocab, hidden), ("vocab", "model"))
    top = {
        "token_norm": leaf(f"{prefix}enorm.weight", *vector),
        "hidden_norm": leaf(f"{prefix}hnorm.weight", *vector),
        "join": leaf(f"{prefix}eh_proj.weight", (hidden, 2 * hidden), (None, "model")),
        "norm": leaf(f"{prefix}shared_head.norm.weight", *vector),
        "own_tokens": leaf(f"{prefix}embed_tokens.weight", *matrix, same_as=embed.source),
        "own_head": leaf(f"{prefix}shared_head.head.weight", *matrix, same_as=head.source),
    }
    block = {
        name: replace(one, source=one.source.replace("{layer}", str(spec.num_layers)))
        for name, one in layout.layers[kind].items()
    }
    own = replace(
        spec,
        num_layers=1,
        groups=(replace(group, layers=(0,)),),
        layer_kinds=(),
    )
    # The rest of the checkpoint is the model's.
    return own, replace(layout, top=top, layers=(block,), derived=(r".*",))
