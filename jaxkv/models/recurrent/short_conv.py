"""Mixes tokens by a gated convolution over the last few of them. Source: LFM2's reference code in
transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax

from jaxkv.axes import MeshAxes
from jaxkv.models.recurrent.mixer import StateArray
from jaxkv.ops.layers import linear, linear_over
from jaxkv.ops.recurrent import Rows, short_conv


@dataclass(frozen=True, kw_only=True, slots=True)
class ShortConv:
    """Computes out(c * conv(b * x)), where b, c and x are projections of the input. width: tokens
    that the convolution sees.
    """

    channels: int
    width: int

    @property
    def arrays(self) -> tuple[StateArray, ...]:
        return (StateArray((self.channels, self.width - 1)),)

    def __call__(
        self,
        h_TD: jax.Array,
        w: Mapping[str, Any],
        states: tuple[jax.Array, ...],
        rows: Rows,
        *,
        axis: MeshAxes | None,
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        (pool,) = states
        b, c, x = (
            linear(h_TD, w[name], w.get(f"{name}_bias")) for name in ("conv_b", "conv_c", "conv_x")
        )
        kernel_XK = w["conv"].reshape(-1, self.width)
        y_TX, pool = short_conv(b * x, kernel_XK, pool, rows, w.get("conv_bias"))
        return linear_over(c * y_TX, w["conv_out"], w.get("conv_out_bias"), axis=axis), (pool,)
