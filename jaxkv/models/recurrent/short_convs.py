"""Convolves keys, values and what a layer's blocks give with the last tokens. Source: Inkling, as
transformers has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax

from jaxkv.models.recurrent.mixer import StateArray
from jaxkv.ops.recurrent import Rows, short_conv

SHORT_CONV = "_short_conv"
"""The names of its leaves end so, behind what they convolve."""

CONVOLVED = ("k", "v", "attn", "mlp")


@dataclass(frozen=True, kw_only=True, slots=True)
class ShortConvs:
    """Adds to each of CONVOLVED its convolution over the last tokens, by channel. channels: of
    keys, as many as of values. hidden: of what blocks give. width: tokens that it sees.
    """

    channels: int
    hidden: int
    width: int

    @property
    def arrays(self) -> tuple[StateArray, ...]:
        """Lists the last inputs of each convolution: of blocks every device has all."""
        of_head = StateArray((self.channels, self.width - 1))
        of_block = StateArray((self.hidden, self.width - 1), axis=None)
        return (of_head, of_head, of_block, of_block)

    def __call__(
        self,
        name: str,
        y_TX: jax.Array,
        w: Mapping[str, Any],
        states: tuple[jax.Array, ...],
        rows: Rows,
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """Returns one of CONVOLVED with what is added, and the states after these tokens."""
        place = CONVOLVED.index(name)
        kernel_XK = w[f"{name}{SHORT_CONV}"].reshape(-1, self.width)
        y_TX, pool = short_conv(y_TX, kernel_XK, states[place], rows, with_input=True)
        return y_TX, (*states[:place], pool, *states[place + 1 :])
