"""Mixes tokens by the mLSTM of xLSTM. Source: arXiv 2405.04517, section 2.3, and 2503.13427."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxkv.axes import MeshAxes
from jaxkv.models.recurrent.mixer import StateArray
from jaxkv.ops.layers import layer_norm, linear, linear_over, soft_cap
from jaxkv.ops.recurrent import Largest, Levels, LinearAttention, Rows, Tokens, run


@dataclass(frozen=True, kw_only=True, slots=True)
class MLstm:
    """Runs keys with exponential gates through linear attention whose heads forget by gates of
    their own, divides what a query finds by what it finds of keys alone, norms each head and gates
    it.

    cap: of gates, by which nothing that is added up overflows. eps: of what is divided by, where
    the largest exponent of gates counts as 0; that is why it is kept.
    """

    num_heads: int
    key_dim: int
    value_dim: int
    cap: float
    eps: float
    norm_eps: float

    @property
    def arrays(self) -> tuple[StateArray, ...]:
        """Lists a matrix per head, with the sum of its keys as a last column, and an exponent."""
        matrices = (self.num_heads, self.key_dim, self.value_dim + 1)
        return StateArray(matrices), StateArray((self.num_heads,))

    def __call__(
        self,
        h_TD: jax.Array,
        w: Mapping[str, Any],
        states: tuple[jax.Array, ...],
        rows: Rows,
        *,
        axis: MeshAxes | None,
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        matrices, exponents = states
        num_tokens = h_TD.shape[0]
        q_TMX, k_TMX, v_TMY = (
            linear(h_TD, w[f"lstm_{name}"]).reshape(num_tokens, -1, size)
            for name, size in (("q", self.key_dim), ("k", self.key_dim), ("v", self.value_dim))
        )
        enter_TM, forget_TM = (
            soft_cap(linear(h_TD, w[f"lstm_{name}"], w[f"lstm_{name}_bias"]), self.cap)
            for name in ("in", "forget")
        )
        decay_TM = jax.nn.log_sigmoid(forget_TM)
        tokens = Tokens(
            q=q_TMX * self.key_dim**-0.5,
            k=k_TMX * jnp.exp(enter_TM)[..., None],
            v=jnp.concatenate([v_TMY, jnp.ones_like(v_TMY[..., :1])], axis=2),
            decay=decay_TM,
        )
        found_TMY, matrices = run(LinearAttention(), tokens, matrices, rows)
        levels = Levels(decay_TM, enter_TM, jnp.ones(num_tokens, jnp.float32))
        most_TM, exponents = run(Largest(), levels, exponents, rows)
        of_keys_TM = jnp.maximum(jnp.abs(found_TMY[..., -1]), 1) + self.eps * jnp.exp(most_TM)
        found_TMY = found_TMY[..., :-1] / of_keys_TM[..., None]
        scale_MY = w["lstm_norm"].reshape(-1, self.value_dim)
        found_TMY = layer_norm(found_TMY, scale_MY, None, eps=self.norm_eps)
        gate_TF = jax.nn.sigmoid(linear(h_TD, w["lstm_gate"]))
        out_TF = gate_TF * found_TMY.reshape(num_tokens, -1)
        return linear_over(out_TF, w["lstm_out"], axis=axis), (matrices, exponents)
