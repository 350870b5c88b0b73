"""The contract of a recurrent mixer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import jax

from jaxkv.axes import MeshAxes
from jaxkv.ops.recurrent import Rows


class StateArray(NamedTuple):
    """Describes what one row keeps in one layer. axis: the one that devices divide (channels,
    heads); None: every device has the whole.
    """

    shape: tuple[int, ...]
    dtype: str = "float32"
    axis: int | None = 0


class Mixer(Protocol):
    """Mixes tokens of a row by a state that each of them changes: a frozen dataclass of what its
    tensors do not show.
    """

    @property
    def arrays(self) -> tuple[StateArray, ...]:
        """Describes the state of a row in one layer, on all devices together."""
        ...

    def __call__(
        self,
        h_TD: jax.Array,
        w: Mapping[str, Any],
        states: tuple[jax.Array, ...],
        rows: Rows,
        *,
        axis: MeshAxes | None,
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """Returns what the tokens of a step are mixed to, [T, D], and the states after it.

        w: the layer's weights. states: the arrays of all layers and slots (`Rows`). axis: the mesh
        axis that divides weights and states, over which the result has to be added up.
        """
        ...
