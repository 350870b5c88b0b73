"""Convolves keys, values and what a layer's blocks give with the last tokens. Sources: Inkling and
Inkling 2, as transformers has them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxkv.models.recurrent.mixer import StateArray
from jaxkv.ops.layers import linear, rounded
from jaxkv.ops.recurrent import Rows, short_conv

SHORT_CONV = "_short_conv"
"""The names of its leaves end so, behind what they convolve."""

SAID = f"{SHORT_CONV}_said"
"""The names of matrices end so that make of what keys or values are made of what each token adds to
the kernel of each KV head.
"""

SOURCE = "_source"
"""Under these names, behind what is made of it, a layer's weights have what keys or values are made
of, where queries are made of something else (`models.depth`).
"""

CONVOLVED = ("k", "v", "attn", "mlp")


@dataclass(frozen=True, kw_only=True, slots=True)
class ShortConvs:
    """Adds to each of CONVOLVED its convolution over the last tokens, by channel. channels: of
    keys, as many as of values. hidden: of what blocks give. width: tokens that it sees. by_root:
    each is divided by the root of the number of its parts, so that a sum of independent ones stays
    as large.
    """

    channels: int
    hidden: int
    width: int
    by_root: bool = False

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
        place, num_parts, said_TGK = CONVOLVED.index(name), 1 + self.width, None
        kernel_XK = w[f"{name}{SHORT_CONV}"].reshape(-1, self.width)
        if f"{name}{SAID}" in w:
            said_TX = linear(w[f"{name}{SOURCE}"], w[f"{name}{SAID}"])
            said_TGK = said_TX.reshape(len(y_TX), -1, self.width)
            # Such a kernel begins with the token itself.
            kernel_XK, num_parts = jnp.flip(kernel_XK, axis=1), num_parts + self.width
        y_TX, pool = short_conv(
            y_TX, kernel_XK, states[place], rows, with_input=True, said_TGK=said_TGK
        )
        y_TX = rounded(y_TX / math.sqrt(num_parts)) if self.by_root else y_TX
        return y_TX, (*states[:place], pool, *states[place + 1 :])
