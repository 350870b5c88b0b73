"""Axis legend: the suffix of an array's name lists its axes in order (`q_TNH`, `table_BW`).

B rows (sequences of the batch)   T packed tokens of a step     L layers of a KV group
P pages of the pool               W pages per row               S slots (tokens) per page
N query heads                     K KV heads                    G = N / K query heads per KV head
H head dim                        D model dim                   F feed-forward dim
V vocabulary                      E stop tokens per row         C pages gathered at once
A adapters on the device          X rank of an adapter
R rows of the engine (a step's B rows are some of them, in any order)

Logical axes, the names that shardings are derived from:
"layer", "vocab", "model" (D), "heads" (N*H), "kv_heads" (K*H), "head_dim" (H), "ffn" (F),
"channels" (rows of a recurrent mixer); never sharded: "experts", "streams" (that a router chooses
or weighs), "ngrams" (rows of tables) and None.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

import jax
import numpy as np

Array = jax.Array

MeshAxes = str | tuple[str, ...]
"""Axes of the mesh of devices that divide something together (`jaxkv.placement`)."""


def axis_names(axes: MeshAxes | None) -> tuple[str, ...]:
    """Lists the names of axes."""
    return (axes,) if isinstance(axes, str) else axes or ()


def joined(names: tuple[str, ...]) -> MeshAxes | None:
    """Returns the axes of these names; None for none."""
    return names[0] if len(names) == 1 else names or None


def num_axes(lengths: Iterable[int], num_parts: int) -> int:
    """Counts how many of the first axes, of these lengths, make so many parts."""
    products = accumulate(lengths, mul, initial=1)
    return next(count for count, product in enumerate(products) if product == num_parts)


@dataclass(frozen=True, slots=True)
class ArrayInfo:
    """Shape, dtype and logical axes of one array, known before any weight is read.

    The loader checks shapes against it; the axes are what shardings will be derived from. The dtype
    is the reference's: what floats are loaded as is the engine's choice. below: the values are
    whole numbers from 0 on and less than it, which stay what they are; None for floats.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    logical_axes: tuple[str | None, ...]
    below: int | None = None

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.logical_axes):
            raise ValueError(
                f"expected one logical axis per dimension of {self.shape}, got {self.logical_axes}"
            )
