"""Mixes each token with the one before it, and values of all tokens by weights that decay. Source:
RWKV, arXiv 2305.13048, section 3.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxkv.axes import MeshAxes
from jaxkv.models.recurrent.mixer import StateArray
from jaxkv.ops.layers import linear, linear_over, rounded
from jaxkv.ops.recurrent import DecayingAverage, Rows, Weighted, run, short_conv


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeMix:
    """Averages values of a row's tokens for each channel, and gates what it finds. size: channels,
    and numbers of an input, of which the last one of a row is kept.
    """

    size: int

    @property
    def arrays(self) -> tuple[StateArray, ...]:
        """Lists the last input, which every device has, and the sums of all channels."""
        return StateArray((self.size, 1), axis=None), StateArray((self.size, 3))

    def __call__(
        self,
        h_TD: jax.Array,
        w: Mapping[str, Any],
        states: tuple[jax.Array, ...],
        rows: Rows,
        *,
        axis: MeshAxes | None,
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        last, kept = states
        before_TD, last = _before(h_TD, last, rows)
        key, value, gate = (
            linear(_mixed(h_TD, before_TD, w[f"time_mix_{name}"]), w[f"time_{name}"])
            for name in ("key", "value", "gate")
        )
        decay_X, bonus_X = (w[f"time_{name}"].astype(jnp.float32) for name in ("decay", "bonus"))
        tokens = Weighted(key, value, jnp.ones(h_TD.shape[0], jnp.float32))
        y_TX, kept = run(DecayingAverage(jnp.exp(decay_X), bonus_X), tokens, kept, rows)
        out_TD = linear_over(jax.nn.sigmoid(gate) * y_TX, w["time_out"], axis=axis)
        return out_TD, (last, kept)


@dataclass(frozen=True, kw_only=True, slots=True)
class ChannelMix:
    """Runs each token and the one before it through an MLP, and gates what it gives. size:
    numbers of an input, of which the last one of a row is kept.
    """

    size: int

    @property
    def arrays(self) -> tuple[StateArray, ...]:
        return (StateArray((self.size, 1), axis=None),)

    def __call__(
        self,
        h_TD: jax.Array,
        w: Mapping[str, Any],
        states: tuple[jax.Array, ...],
        rows: Rows,
        *,
        axis: MeshAxes | None,
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        before_TD, last = _before(h_TD, states[0], rows)
        key_TF, gate_TD = (
            linear(_mixed(h_TD, before_TD, w[f"channel_mix_{name}"]), w[f"channel_{name}"])
            for name in ("key", "gate")
        )
        out_TD = linear_over(jnp.square(jax.nn.relu(key_TF)), w["channel_out"], axis=axis)
        return jax.nn.sigmoid(gate_TD) * out_TD, (last,)


def _before(h_TD: jax.Array, pool: jax.Array, rows: Rows) -> tuple[jax.Array, jax.Array]:
    """Returns what came in of the token before each, zeros before a row's first, and the pool with
    the last of each row.
    """
    kernel_D2 = jnp.broadcast_to(jnp.array([1.0, 0.0]), (h_TD.shape[1], 2))
    return short_conv(h_TD, kernel_D2, pool, rows)


def _mixed(h_TD: jax.Array, before_TD: jax.Array, share_D: jax.Array) -> jax.Array:
    share_1D = share_D.astype(jnp.float32)[None]
    return h_TD * share_1D + rounded(before_TD * (1 - share_1D))
