"""Mixes tokens by Mamba's selective state space. Source: arXiv 2312.00752, section 3; Jamba, arXiv
2403.19887 (the norms inside).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxkv.axes import MeshAxes
from jaxkv.models.recurrent.mixer import StateArray
from jaxkv.ops.layers import linear, linear_over, rms_norm
from jaxkv.ops.matrices import HeadMatrices
from jaxkv.ops.recurrent import Rows, Selected, Selective, run, short_conv


@dataclass(frozen=True, kw_only=True, slots=True)
class Mamba:
    """Runs values through a short convolution and a state of `state_dim` numbers per channel, which
    each token forgets, writes and reads as its values say, and gates what it finds.

    rank: columns of the matrix that makes step sizes. width: tokens that the convolution sees.
    norm_eps: of norms of what makes step sizes, is written and read, where there are such norms,
    with weights if they have tensors; None: there are none. Where what makes these is by head, each
    part of the channels has its own (Zamba).
    """

    channels: int
    state_dim: int
    rank: int
    width: int
    norm_eps: float | None

    @property
    def arrays(self) -> tuple[StateArray, ...]:
        """Lists the last inputs of the convolution, and the states of all channels."""
        tail = StateArray((self.channels, self.width - 1))
        return tail, StateArray((self.channels, self.state_dim))

    def __call__(
        self,
        h_TD: jax.Array,
        w: Mapping[str, Any],
        states: tuple[jax.Array, ...],
        rows: Rows,
        *,
        axis: MeshAxes | None,
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        tails, kept = states
        x_TX, z_TX = (linear(h_TD, w[name], w.get(f"{name}_bias")) for name in ("scan_x", "scan_z"))
        kernel_XK = w["scan_conv"].reshape(-1, self.width)
        x_TX, tails = short_conv(x_TX, kernel_XK, tails, rows, w.get("scan_conv_bias"))
        x_TX = jax.nn.silu(x_TX)
        ends = (self.rank, self.rank + self.state_dim)
        rest, steps = w["scan_rest"], w["scan_dt"]
        is_by_head = isinstance(rest, HeadMatrices)  # each device has all of some heads
        if is_by_head:
            rest_T = rest.dot(x_TX.reshape(x_TX.shape[0], rest.num_heads, -1))
        else:
            rest_T = linear_over(x_TX, rest, None, axis=axis)
        parts = jnp.split(rest_T, ends, axis=-1)
        names = ("scan_dt_norm", "scan_b_norm", "scan_c_norm")
        dt, b, c = (
            self._normed(part, w.get(name)) for part, name in zip(parts, names, strict=True)
        )
        if is_by_head:
            step_TX = steps.dot(dt).reshape(x_TX.shape) + w["scan_step"][None]
        else:
            step_TX = linear(dt, steps, w["scan_step"])
        step_TX = jax.nn.softplus(step_TX)
        rate_XN = jnp.exp(w["scan_rate"].astype(jnp.float32)).reshape(-1, self.state_dim)
        tokens = Selected(delta=step_TX, x=x_TX, b=b, c=c)
        y_TX, kept = run(Selective(-rate_XN), tokens, kept, rows)
        y_TX += w["scan_skip"].astype(jnp.float32)[None] * x_TX
        y_TX *= jax.nn.silu(z_TX)
        out_TD = linear_over(y_TX, w["scan_out"], w.get("scan_out_bias"), axis=axis)
        return out_TD, (tails, kept)

    def _normed(self, x_TX: jax.Array, scale_X: jax.Array | None) -> jax.Array:
        if self.norm_eps is None:
            return x_TX
        scale_X = jnp.ones(x_TX.shape[1], jnp.float32) if scale_X is None else scale_X
        return rms_norm(x_TX, scale_X, eps=self.norm_eps)
