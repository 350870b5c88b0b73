"""Describes what a model is, apart from what its weights already show."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeSpec:
    """Rotary embedding; `kind` is one of default, linear, llama3, yarn, the rest are that kind's
    parameters.

    Lengths are in tokens. Sources: RoFormer arXiv 2104.09864 (default), arXiv 2306.15595 (linear),
    Llama 3.1 (llama3), YaRN arXiv 2309.00071 (yarn).
    """

    kind: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_len: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class KVGroup:
    """Layers that share a cache shape and a window, and so a page table.

    `window` counts the tokens that a query sees, itself included; None sees everything before it.
    """

    layers: tuple[int, ...]
    num_kv_heads: int
    head_dim: int
    window: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """A decoder-only transformer. Biases, qk-norm and an untied head are not here: their tensors
    are the flag.
    """

    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    norm_eps: float
    activation: str
    rope: RopeSpec
    groups: tuple[KVGroup, ...]
    max_len: int
    """Longest context the checkpoint declares, in tokens."""

    def group_of(self, layer: int) -> tuple[int, int]:
        """Returns (group, index of the layer within that group)."""
        for g, group in enumerate(self.groups):
            if layer in group.layers:
                return g, group.layers.index(layer)
        raise ValueError(f"expected a layer below {self.num_layers}, got {layer}")

    def cut(self, size: int) -> ModelSpec:
        """Returns this model with its KV groups cut into as few as have at most `size` layers."""
        groups = []
        for group in self.groups:
            count, num_layers = -(-len(group.layers) // size), len(group.layers)
            ends = [num_layers * i // count for i in range(count + 1)]
            groups += [replace(group, layers=group.layers[a:b]) for a, b in pairwise(ends)]
        return replace(self, groups=tuple(groups))

    @property
    def longest_window(self) -> int | None:
        """Returns the tokens that a query sees at most in any layer; None if some layer sees
        everything.
        """
        windows = [group.window for group in self.groups]
        return (
            max((w for w in windows if w is not None), default=None)
            if None not in windows
            else None
        )

    def apart(self, layers: frozenset[int]) -> ModelSpec:
        """Returns this model with these layers in KV groups of their own."""
        groups = []
        for group in self.groups:
            for named in (False, True):
                if some := tuple(layer for layer in group.layers if (layer in layers) == named):
                    groups.append(replace(group, layers=some))
        return replace(self, groups=tuple(groups))

    def joined(self) -> ModelSpec:
        """Returns the model that `apart` and `cut` were asked for."""
        layers: dict[KVGroup, list[int]] = {}
        for group in self.groups:
            layers.setdefault(replace(group, layers=()), []).extend(group.layers)
        return replace(
            self, groups=tuple(replace(g, layers=tuple(sorted(of))) for g, of in layers.items())
        )
