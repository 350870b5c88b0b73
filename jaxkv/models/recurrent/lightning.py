"""Mixes tokens by lightning attention. Source: MiniMax-01, arXiv 2501.08313, section 2.2."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.axes import MeshAxes
from jaxkv.models.recurrent.mixer import StateArray
from jaxkv.ops.layers import ACTIVATIONS, linear, linear_over, rms_norm
from jaxkv.ops.recurrent import LinearAttention, Rows, Tokens, run


@dataclass(frozen=True, kw_only=True, slots=True)
class Lightning:
    """Runs queries, keys and values with an activation through linear attention whose heads forget
    by a rate of their own, norms what it finds over all heads and gates it.

    layers: the numbers of the layers that have it, among `num_layers`: the later one is, the slower
    it forgets.
    """

    num_heads: int
    head_dim: int
    norm_eps: float
    activation: str
    layers: tuple[int, ...]
    num_layers: int

    @property
    def arrays(self) -> tuple[StateArray, ...]:
        """Lists a matrix per head."""
        return (StateArray((self.num_heads, self.head_dim, self.head_dim)),)

    @property
    def decay_LM(self) -> np.ndarray:
        """Returns the logarithm of what each token leaves of the state of each head, by layer."""
        rate_M = 2.0 ** (-8 / self.num_heads * (np.arange(self.num_heads) + 1))
        part_L = 1 - np.array(self.layers) / (self.num_layers - 1 + 1e-5) + 1e-5
        return (-rate_M[None] * part_L[:, None]).astype(np.float32)

    def __call__(
        self,
        h_TD: jax.Array,
        w: Mapping[str, Any],
        states: tuple[jax.Array, ...],
        rows: Rows,
        *,
        axis: MeshAxes | None,
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        (matrices,) = states
        activate = ACTIVATIONS[self.activation]
        q_TMX, k_TMX, v_TMX = (
            activate(linear(h_TD, w[f"light_{name}"])).reshape(h_TD.shape[0], -1, self.head_dim)
            for name in "qkv"
        )
        num_heads = q_TMX.shape[1]
        decay_M = jnp.asarray(self.decay_LM)[rows.layer]
        if axis is not None:  # a device's own heads
            first = jax.lax.axis_index(axis) * num_heads
            decay_M = jax.lax.dynamic_slice_in_dim(decay_M, first, num_heads)
        decay_TM = jnp.broadcast_to(decay_M[None], q_TMX.shape[:2])
        tokens = Tokens(q=q_TMX, k=k_TMX, v=v_TMX, decay=decay_TM)
        found_TMX, matrices = run(LinearAttention(), tokens, matrices, rows)
        found_TX = found_TMX.reshape(h_TD.shape[0], -1)
        found_TX = rms_norm(found_TX, w["light_norm"], eps=self.norm_eps, axis=axis)
        found_TX *= jax.nn.sigmoid(linear(h_TD, w["light_gate"]))
        return linear_over(found_TX, w["light_out"], axis=axis), (matrices,)
