"""Mixes tokens by the RG-LRU. Source: Griffin, arXiv 2402.19427, sections 2.3 and 2.4."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxkv.axes import MeshAxes
from jaxkv.models.recurrent.mixer import StateArray
from jaxkv.ops.layers import ACTIVATIONS, linear, linear_over, rounded
from jaxkv.ops.recurrent import Diagonal, Gains, Rows, run, short_conv

BLOCKS = "tjx,jxy->tjy"

STRENGTH = 8.0
"""Multiplies the recurrence gate in the exponent: the c of the paper."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RgLru:
    """Runs values through a short convolution and a recurrence of each number by itself, and
    multiplies with a branch that has an activation. Gates of input and recurrence are products with
    one matrix for each of `num_blocks` blocks of `block_dim` values.

    width: tokens that the convolution sees.
    """

    num_blocks: int
    block_dim: int
    width: int
    activation: str

    @property
    def arrays(self) -> tuple[StateArray, ...]:
        """Lists the last inputs of the convolution, and the state of each value, by block."""
        tail = StateArray((self.num_blocks * self.block_dim, self.width - 1))
        # A device has whole blocks.
        return tail, StateArray((self.num_blocks, self.block_dim))

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
        x_TX, y_TX = (linear(h_TD, w[name], w[f"{name}_bias"]) for name in ("lru_x", "lru_y"))
        kernel_XK = w["lru_conv"].reshape(-1, self.width)
        x_TX, tails = short_conv(x_TX, kernel_XK, tails, rows, w["lru_conv_bias"])
        x_TJX = x_TX.reshape(h_TD.shape[0], -1, self.block_dim)
        rate_JX = jax.nn.softplus(w["lru_rate"].astype(jnp.float32)).reshape(-1, self.block_dim)
        decay_TJX = -STRENGTH * self._gate(x_TJX, w, "lru_decay_gate") * rate_JX[None]
        # What joins is made smaller by as much as is kept; nothing is before the first token. expm1
        # would be better than what models were trained with: where nearly all is kept, by 1e-2 of
        # the deviation of the logits.
        is_first_T = jnp.asarray(rows.batch.position_T) == 0
        kept_TJX = rounded(jnp.exp(rounded(2 * decay_TJX)))
        factor_TJX = jnp.where(is_first_T[:, None, None], 1, jnp.sqrt(1 - kept_TJX))
        gain_TJX = x_TJX * self._gate(x_TJX, w, "lru_input_gate") * factor_TJX
        found_TJX, kept = run(Diagonal(), Gains(decay_TJX, gain_TJX), kept, rows)
        out_TX = found_TJX.reshape(x_TX.shape) * ACTIVATIONS[self.activation](y_TX)
        return linear_over(out_TX, w["lru_out"], w["lru_out_bias"], axis=axis), (tails, kept)

    def _gate(self, x_TJX: jax.Array, w: Mapping[str, Any], name: str) -> jax.Array:
        """Computes a gate of each value from all values of its block."""
        matrix_JXY = w[name].astype(jnp.float32).reshape(-1, self.block_dim, self.block_dim)
        bias_JX = w[f"{name}_bias"].astype(jnp.float32).reshape(-1, self.block_dim)
        y_TJX = jax.lax.platform_dependent(
            x_TJX, matrix_JXY, cpu=_block_by_block, default=partial(jnp.einsum, BLOCKS)
        )
        return jax.nn.sigmoid(y_TJX + bias_JX[None])


def _block_by_block(x_TJX: jax.Array, matrix_JXY: jax.Array) -> jax.Array:
    """Multiplies one block after the other: of all at once XLA:CPU adds up a token's products in an
    order that the number of tokens decides.
    """
    both = (x_TJX.transpose(1, 0, 2), matrix_JXY)
    return jax.lax.map(lambda one: one[0] @ one[1], both).transpose(1, 0, 2)
