"""Mixes tokens by the gated delta rule: Gated DeltaNet, and Kimi delta attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxkv.axes import MeshAxes
from jaxkv.models.recurrent.mixer import StateArray
from jaxkv.ops.layers import linear, linear_over, rms_norm, total
from jaxkv.ops.recurrent import LinearAttention, Rows, Tokens, run, short_conv

GATES = {"silu": jax.nn.silu, "sigmoid": jax.nn.sigmoid}
TINY = 1e-6
"""What keeps the length of a key away from 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GatedDelta:
    """Runs queries, keys and values through a short convolution and the gated delta rule, norms
    what it finds and gates it.

    num_key_heads, num_heads: of keys and queries, and of values, which are a multiple. key_dim,
    value_dim: their sizes. kernel: tokens that the convolution sees. by_channel: every channel of a
    key has a decay of its own. most_beta: how far a token moves what its key finds at most. gate:
    the activation of the gate. least_decay: of the logarithm of decays, which a sigmoid brings
    there; 0 for none.
    Sources: arXiv 2412.06464, section 3; by channel arXiv 2510.26692, section 3; with a least the
    card of inclusionAI/Ling-3.0-flash.
    """

    num_key_heads: int
    num_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    norm_eps: float
    by_channel: bool = False
    most_beta: float = 1.0
    gate: str = "silu"
    least_decay: float = 0.0

    @property
    def num_steps(self) -> int:
        """Counts the decays of a token."""
        return self.num_heads * (self.key_dim if self.by_channel else 1)

    @property
    def arrays(self) -> tuple[StateArray, ...]:
        """Lists the last inputs of the convolution, and a matrix per head, by key head."""
        channels = 2 * self.num_key_heads * self.key_dim + self.num_heads * self.value_dim
        group = self.num_heads // self.num_key_heads
        # A device has whole key heads.
        matrices = (self.num_key_heads, group, self.key_dim, self.value_dim)
        return StateArray((channels, self.kernel - 1)), StateArray(matrices)

    def __call__(
        self,
        h_TD: jax.Array,
        w: Mapping[str, Any],
        states: tuple[jax.Array, ...],
        rows: Rows,
        *,
        axis: MeshAxes | None,
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        tails, matrices = states
        num_tokens = h_TD.shape[0]
        names = ("delta_q", "delta_k", "delta_v")
        # A device has whole heads of each, so its channels are those of its own heads.
        mixed_TX = jnp.concatenate([linear(h_TD, w[name]) for name in names], axis=1)
        kernels = [w[f"{name}_conv"].reshape(-1, self.kernel) for name in names]
        mixed_TX, tails = short_conv(mixed_TX, jnp.concatenate(kernels), tails, rows)
        q_TX, k_TX, v_TX = jnp.split(jax.nn.silu(mixed_TX), _ends(kernels), axis=1)
        q_TJX, k_TJX = (_unit(x.reshape(num_tokens, -1, self.key_dim)) for x in (q_TX, k_TX))
        v_TMY = v_TX.reshape(num_tokens, -1, self.value_dim)
        tokens = Tokens(
            q=q_TJX * self.key_dim**-0.5,
            k=k_TJX,
            v=v_TMY,
            decay=self._decay(h_TD, w),
            beta=jax.nn.sigmoid(linear(h_TD, w["delta_b"])) * self.most_beta,
        )
        found_TMY, matrices = run(
            LinearAttention(by_channel=self.by_channel), tokens, matrices, rows
        )
        found_TMY = rms_norm(found_TMY, w["delta_norm"], eps=self.norm_eps)
        gate_TMY = _through(h_TD, w, "delta_gate").reshape(found_TMY.shape)
        out_TF = (found_TMY * GATES[self.gate](gate_TMY)).reshape(num_tokens, -1)
        return linear_over(out_TF, w["delta_out"], axis=axis), (tails, matrices)

    def _decay(self, h_TD: jax.Array, w: Mapping[str, Any]) -> jax.Array:
        """Computes the logarithm of what each token leaves of the state, by head or channel."""
        rate_M = jnp.exp(w["delta_rate"].astype(jnp.float32))
        step_TX = _through(h_TD, w, "delta_step") + w["delta_step_bias"].astype(jnp.float32)[None]
        if not self.by_channel:
            return -rate_M[None] * jax.nn.softplus(step_TX)
        step_TMX = step_TX.reshape(h_TD.shape[0], -1, self.key_dim)
        if self.least_decay:
            return self.least_decay * jax.nn.sigmoid(rate_M[None, :, None] * step_TMX)
        return -rate_M[None, :, None] * jax.nn.softplus(step_TMX)


def _through(h_TD: jax.Array, w: Mapping[str, Any], name: str) -> jax.Array:
    """Multiplies with a matrix, or with two that have few columns between them."""
    if f"{name}_in" in w:
        h_TD = linear(h_TD, w[f"{name}_in"])
    return linear(h_TD, w[name])


def _unit(x: jax.Array) -> jax.Array:
    """Divides by the length over the last axis."""
    return x * jax.lax.rsqrt(total(x * x)[..., None] + TINY)


def _ends(parts: list[jax.Array]) -> list[int]:
    first, second, _ = (len(part) for part in parts)
    return [first, first + second]
