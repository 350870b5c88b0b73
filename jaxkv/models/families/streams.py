"""Describes what gives tokens several streams (`models.hyper`): how many, and the tensors."""

from __future__ import annotations

from dataclasses import replace

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import LAYER, Leaf, leaf
from jaxkv.models.hyper import JOIN
from jaxkv.models.spec import HyperSpec

MAX_STREAMS, MAX_ROUNDS = 64, 1000


def read_streams(config: ConfigReader) -> HyperSpec:
    """Reads how many streams there are, without a matrix between them."""
    return HyperSpec(
        num_streams=config.size("hc_mult", 4, at_most=MAX_STREAMS),
        eps=config.number("hc_eps", 1e-6),
    )


def read_mixed_streams(config: ConfigReader) -> HyperSpec:
    """Reads how many streams there are, with a matrix between them."""
    rounds = config.size("hc_sinkhorn_iters", 20, at_most=MAX_ROUNDS)
    return replace(read_streams(config), num_rounds=rounds)


def read_gated_streams(config: ConfigReader) -> HyperSpec:
    """Reads how many streams there are of those that are gated."""
    return HyperSpec(num_streams=config.size("hc_count", 4, at_least=2, at_most=MAX_STREAMS))


def gates(asked: HyperSpec, rank: int, hidden: int, name: str, prefix: str) -> dict[str, Leaf]:
    """Describes what gates streams. name: what its leaves begin with."""
    width = asked.num_streams * hidden
    return {
        f"{name}_norm": leaf(f"{prefix}hc_norm.weight", (width,), (None,)),
        f"{name}_down": leaf(f"{prefix}input_mix_weight_down.weight", (rank, width), (None, None)),
        f"{name}_up": leaf(f"{prefix}input_mix_weight_up.weight", (width, rank), (None, None)),
    }


def gated_connections(asked: HyperSpec, rank: int, hidden: int) -> dict[str, Leaf]:
    """Describes what connects the blocks of a layer with gated streams."""
    found: dict[str, Leaf] = {}
    count = asked.num_streams
    for name in ("attn_hyper", "mlp_hyper"):
        prefix = f"{LAYER}{name}_connection."
        found |= gates(asked, rank, hidden, name, prefix)
        inject = f"{prefix}block_inject_weight.weight"
        found[f"{name}_inject"] = leaf(inject, (count, count * hidden), ("streams", None))
    return found


def joining(asked: HyperSpec, hidden: int, prefix: str) -> dict[str, Leaf]:
    """Describes what makes hidden states of streams behind the last layer."""
    count = asked.num_streams
    return {
        JOIN: leaf(f"{prefix}fn", (count, count * hidden), ("streams", None)),
        f"{JOIN}_bias": leaf(f"{prefix}base", (count,), (None,)),
        f"{JOIN}_scale": leaf(f"{prefix}scale", (1,), (None,)),
    }


def connections(asked: HyperSpec, hidden: int, sources: tuple[str, str]) -> dict[str, Leaf]:
    """Describes what connects the blocks of a layer, mixer and feed-forward, with its streams."""
    found, count, has_matrix = {}, asked.num_streams, asked.num_rounds > 0
    rows = count * (2 + count * has_matrix)
    for name, source in zip(("attn_hyper", "mlp_hyper"), sources, strict=True):
        prefix = f"{LAYER}{source}"
        found[name] = leaf(f"{prefix}fn", (rows, count * hidden), ("streams", None))
        found[f"{name}_bias"] = leaf(f"{prefix}base", (rows,), (None,))
        found[f"{name}_scale"] = leaf(f"{prefix}scale", (2 + has_matrix,), (None,))
    return found
