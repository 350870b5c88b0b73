"""Describes the layer behind the last one, which predicts the token after the next (multi-token
prediction), as checkpoints of DeepSeek V3 and V3.2, GLM-4.5, GLM-4.7-Flash and GLM-5 have it, and
by other names those of Qwen3-Next. Sources: arXiv 2412.19437, section 2.2; vLLM's
Qwen3NextMultiTokenPredictor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from jaxkv.models.families.base import LAYER, Layout, Leaf, leaf
from jaxkv.models.spec import HiddenStates, ModelSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Names:
    """Says what the tensors of such a layer are called: those of its block behind `block`, the
    others behind `prefix`; {layer} is the number behind the model's last layer. head None: it is
    the model's.
    """

    prefix: str = LAYER
    block: str = LAYER
    token_norm: str = "enorm"
    hidden_norm: str = "hnorm"
    join: str = "eh_proj"
    norm: str = "shared_head.norm"
    embed: str = "embed_tokens"
    head: str | None = "shared_head.head"


DEEPSEEK = Names()
QWEN = Names(
    prefix="mtp.",
    block="mtp.layers.0.",
    token_norm="pre_fc_norm_embedding",
    hidden_norm="pre_fc_norm_hidden",
    join="fc",
    norm="norm",
    head=None,
)
PREDICTING = {
    "deepseek_v3": DEEPSEEK,
    "deepseek_v32": DEEPSEEK,
    "glm4_moe": DEEPSEEK,
    "glm4_moe_lite": DEEPSEEK,
    "glm_moe_dsa": DEEPSEEK,
    "qwen3_next": QWEN,
}
"""Families whose layers of this kind are known to be computed so."""


def read_predictor(spec: ModelSpec, layout: Layout) -> tuple[ModelSpec, Layout]:
    """Returns spec and layout of the first layer behind the last, as a model of that layer alone
    (`models.predictor`). Its block is like the last one of the model's that attend.

    Embeddings and head are the model's: copies of them that the checkpoint has are leaves only if
    they are not equal.
    """
    names, hidden, vocab = PREDICTING[spec.family], spec.hidden_size, spec.vocab_size
    last = spec.kv_layers[-1]
    kind = spec.layer_kinds[last] if spec.layer_kinds else 0
    group = spec.groups[spec.group_of(last)[0]]
    number = str(spec.num_layers)
    prefix, block = (x.replace("{layer}", number) for x in (names.prefix, names.block))
    embed, head = layout.top["embed"], layout.top["head"]
    head = head if head.same_as is None else embed
    vector = ((hidden,), ("model",))
    matrix = ((vocab, hidden), ("vocab", "model"))
    top = {
        "token_norm": leaf(f"{prefix}{names.token_norm}.weight", *vector),
        "hidden_norm": leaf(f"{prefix}{names.hidden_norm}.weight", *vector),
        "join": leaf(f"{prefix}{names.join}.weight", (hidden, 2 * hidden), (None, "model")),
        "norm": leaf(f"{prefix}{names.norm}.weight", *vector),
        "own_tokens": leaf(f"{prefix}{names.embed}.weight", *matrix, same_as=embed.source),
    }
    if names.head is not None:
        own_head = leaf(f"{prefix}{names.head}.weight", *matrix, same_as=head.source)
        top["own_head"] = own_head
    leaves = {
        name: replace(one, source=one.source.replace(LAYER, block))
        for name, one in _leaves_of(layout, kind).items()
    }
    own = replace(
        spec,
        num_layers=1,
        groups=(replace(group, layers=(0,)),),
        layer_kinds=(),
        states=(),
    )
    # The rest of the checkpoint is the model's.
    return own, replace(
        layout, top=top, layers=(leaves,), derived=(r".*",), hidden_states=HiddenStates()
    )


def _leaves_of(layout: Layout, kind: int) -> Mapping[str, Leaf]:
    """Returns the leaves of a layer of that kind which shares no other's index heads: those of the
    layer behind the last are its own.
    """
    index = {
        name: one
        for layer in layout.layers
        for name, one in layer.items()
        if name.startswith("index_")
    }
    return index | dict(layout.layers[kind])
