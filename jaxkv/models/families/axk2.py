"""A.X-K2: DeepSeek V3.2 with gates of norms and of what attention gives. Source: transformers'
AXK2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.axk1 import read_dense
from jaxkv.models.families.base import Layout, Leaf, Part, leaf
from jaxkv.models.families.deepseek_v3 import read_deepseek
from jaxkv.models.families.latent import MAX_HEAD, read_index
from jaxkv.models.spec import ModelSpec

SPELLINGS = (
    (r"layernorm\.mlp\.fc1\.", "layernorm.W_down."),
    (r"layernorm\.mlp\.fc2\.", "layernorm.W_up."),
    (r"\.q_gate_proj\.", ".q_b_proj."),
)
"""What transformers' modules are called, and so adapters; its checkpoints have the other names."""


def read(config: ConfigReader) -> tuple[ModelSpec, Layout]:
    for key, other in (("n_group", "topk_group"), ("topk_group", "n_group")):
        if config.get(key) is None and config.get(other) is not None:
            raise config.fail(key, f"a number, as {other} is one, or null for both")
    spec, layout = read_deepseek(
        config,
        is_dense=read_dense(config),
        index=read_index(config, interleaved=False),
    )
    if spec.router is not None:  # of experts that all count 0 the first ones are chosen
        spec = replace(spec, router=replace(spec.router, others_count_zero=True))
    rank = config.size("gated_norm_rank", at_most=MAX_HEAD)
    layers = tuple(_with_gates(one, spec.num_heads, rank) for one in layout.layers)
    return spec, replace(layout, layers=layers, spellings=SPELLINGS)


def _with_gates(leaves: Mapping[str, Leaf], num_heads: int, rank: int) -> dict[str, Leaf]:
    """Returns the arrays of a layer with those of its gates. rank: of what gates norms.

    Queries and gates are made of the latent behind its norm and, next to it, before the norm; one
    tensor has, head by head, what makes its query and what makes its gate.
    """
    (num_queries, q_rank), num_values = leaves["q"].info.shape, leaves["o"].info.shape[1]
    both = Part(shape=(num_queries + num_values, 2 * q_rank), num_blocks=num_heads)
    size = num_queries // num_heads
    parts = {
        "q": (num_queries, replace(both, stop=size)),
        "attn_gate": (num_values, replace(both, start=size)),
    }
    found = dict(leaves)
    for name, (count, part) in parts.items():
        shape = (count, 2 * q_rank)
        found[name] = leaf(leaves["q"].source, shape, ("heads", None), part=part)
    for name in ("attn_norm", "mlp_norm") if "router" in leaves else ("attn_norm",):
        source, (hidden,) = leaves[name].source.removesuffix("weight"), leaves[name].info.shape
        found[name] = replace(leaves[name], source=f"{source}norm.weight")
        down, up = (f"{source}W_{way}.weight" for way in ("down", "up"))
        found[f"{name}_down"] = leaf(down, (rank, hidden), (None, "model"))
        found[f"{name}_up"] = leaf(up, (hidden, rank), ("model", None))
    return found
