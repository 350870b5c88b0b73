"""Mixes tokens by Mamba2's state space. Source: arXiv 2405.21060, sections 6 and 7."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxkv.axes import MeshAxes
from jaxkv.models.recurrent.mixer import StateArray
from jaxkv.ops.layers import ACTIVATIONS, linear, linear_over, rms_norm
from jaxkv.ops.recurrent import LinearAttention, Rows, Tokens, run, short_conv

PROJECTED = ("ssm_z", "ssm_x", "ssm_b", "ssm_c", "ssm_dt")
"""The gate, what joins the state, how it is written and read, and the step size."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mamba2:
    """Runs values and what writes and reads them through a short convolution and the state space,
    gates what it finds and norms it, or norms it first.

    num_groups: of heads, which write and read alike, and are normed together. width: tokens that
    the convolution sees. least_step: no step is smaller. factors: of what is projected, in the
    order of `PROJECTED`; in_factor, out_factor: of input and output.
    """

    num_heads: int
    head_dim: int
    num_groups: int
    state_dim: int
    width: int
    norm_eps: float
    activation: str = "silu"
    norms_first: bool = False
    least_step: float = 0.0
    factors: tuple[float, ...] = (1.0,) * len(PROJECTED)
    in_factor: float = 1.0
    out_factor: float = 1.0

    @property
    def axis(self) -> int | None:
        """Returns the axis of arrays by group that devices divide: groups, unless all heads are one
        group, of which each device has the whole.
        """
        return 0 if self.num_groups > 1 else None

    @property
    def arrays(self) -> tuple[StateArray, ...]:
        """Lists the last inputs of the convolution, of values and of the rest, and a matrix per
        head, by group.
        """
        tail, group = self.width - 1, self.num_heads // self.num_groups
        matrices = (self.num_groups, group, self.state_dim, self.head_dim)
        return (
            StateArray((self.num_heads * self.head_dim, tail)),
            StateArray((2 * self.num_groups * self.state_dim, tail), axis=self.axis),
            StateArray(matrices, axis=1 if self.axis is None else 0),
        )

    def __call__(
        self,
        h_TD: jax.Array,
        w: Mapping[str, Any],
        states: tuple[jax.Array, ...],
        rows: Rows,
        *,
        axis: MeshAxes | None,
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        of_values, of_rest, matrices = states
        projected = {
            name: linear(h_TD * self.in_factor, w[name], w.get(f"{name}_bias")) * factor
            for name, factor in zip(PROJECTED, self.factors, strict=True)
        }
        x_TX, of_values = self._convolve(projected, w, ("ssm_x",), of_values, rows)
        bc_TX, of_rest = self._convolve(projected, w, ("ssm_b", "ssm_c"), of_rest, rows)
        b_TJN, c_TJN = (
            one.reshape(h_TD.shape[0], -1, self.state_dim) for one in jnp.split(bc_TX, 2, axis=1)
        )
        bias_M = w["ssm_step"].astype(jnp.float32)
        step_TM = jax.nn.softplus(projected["ssm_dt"] + bias_M[None])
        step_TM = jnp.maximum(step_TM, self.least_step)
        x_TMY = x_TX.reshape(*step_TM.shape, self.head_dim)
        rate_M = jnp.exp(w["ssm_rate"].astype(jnp.float32))
        tokens = Tokens(
            q=c_TJN, k=b_TJN, v=x_TMY * step_TM[..., None], decay=-rate_M[None] * step_TM
        )
        y_TMY, matrices = run(LinearAttention(), tokens, matrices, rows)
        y_TMY += w["ssm_skip"].astype(jnp.float32)[None, :, None] * x_TMY
        y_TX = self._gated(y_TMY.reshape(x_TX.shape), projected["ssm_z"], w, axis)
        out_TD = linear_over(y_TX, w["ssm_out"], w.get("ssm_out_bias"), axis=axis)
        return out_TD * self.out_factor, (of_values, of_rest, matrices)

    def _convolve(
        self,
        projected: Mapping[str, jax.Array],
        w: Mapping[str, Any],
        names: tuple[str, ...],
        pool: jax.Array,
        rows: Rows,
    ) -> tuple[jax.Array, jax.Array]:
        """Convolves what is projected under these names, side by side."""

        def joined(suffix: str) -> jax.Array:
            return jnp.concatenate([w[name + suffix] for name in names])

        mixed_TX = jnp.concatenate([projected[name] for name in names], axis=1)
        kernel_XK = joined("_conv").reshape(-1, self.width)
        bias_X = joined("_conv_bias") if f"{names[0]}_conv_bias" in w else None
        y_TX, pool = short_conv(mixed_TX, kernel_XK, pool, rows, bias_X)
        return ACTIVATIONS[self.activation](y_TX), pool

    def _gated(
        self, y_TX: jax.Array, z_TX: jax.Array, w: Mapping[str, Any], axis: MeshAxes | None
    ) -> jax.Array:
        gate_TX = jax.nn.silu(z_TX)
        if "ssm_norm" not in w:
            return y_TX * gate_TX
        if self.norms_first:
            return self._normed(y_TX, w["ssm_norm"], axis) * gate_TX
        return self._normed(y_TX * gate_TX, w["ssm_norm"], axis)

    def _normed(self, y_TX: jax.Array, scale_X: jax.Array, axis: MeshAxes | None) -> jax.Array:
        """Norms each group of heads by itself."""
        if self.num_groups == 1:
            return rms_norm(y_TX, scale_X, eps=self.norm_eps, axis=axis)
        size = self.num_heads * self.head_dim // self.num_groups
        y_TJX = y_TX.reshape(y_TX.shape[0], -1, size)
        return rms_norm(y_TJX, scale_X.reshape(-1, size), eps=self.norm_eps).reshape(y_TX.shape)
