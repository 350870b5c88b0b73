"""Rotary frequencies of a model: what its `RopeSpec`s mean in numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.models.spec import ModelSpec, RopeSpec
from jaxkv.ops.rotation import (
    Rotation,
    default_inv_freq,
    llama3_inv_freq,
    proportional_inv_freq,
    rope_tables,
    yarn_inv_freq,
)


class Ropes:
    """Has the rotation of every layer in one step: tables are made once for each rope that some
    layer has.

    context_T: for each token how long its sequence may get, by which `dynamic` and `longrope`
    choose their frequencies, once for a sequence; None: no longer than what the model was made for.
    growth_C: logarithms of factors on frequencies, which a model has learned; None for no factors.
    """

    def __init__(
        self,
        spec: ModelSpec,
        position_T: jax.Array,
        context_T: jax.Array | None = None,
        growth_C: jax.Array | None = None,
    ) -> None:
        ropes = spec.layer_ropes or (spec.rope,) * spec.num_layers
        # With their dimensions: heads of several sizes may have the same rope.
        self._ropes_L = [
            replace(rope, dim=rope.dim or spec.groups[spec.group_of(layer)[0]].head_dim)
            if rope is not None and spec.has_attention(layer)
            else None
            for layer, rope in enumerate(ropes)
        ]
        self._tables = {
            rope: self._table(rope, position_T, context_T, growth_C)
            for rope in dict.fromkeys(self._ropes_L)
            if rope is not None
        }

    @staticmethod
    def _table(
        rope: RopeSpec,
        position_T: jax.Array,
        context_T: jax.Array | None,
        growth_C: jax.Array | None,
    ) -> tuple[jax.Array, jax.Array]:
        inv_freq: jax.Array | np.ndarray = rope_frequencies(rope, rope.dim)
        if context_T is not None and rope.depends_on_context:
            inv_freq = _frequencies_in_context(rope, context_T)
        if growth_C is not None:
            inv_freq = inv_freq * jnp.exp(growth_C)
        return rope_tables(position_T, inv_freq, rope.attention_factor)

    def of(self, layers: Sequence[int]) -> Callable[[jax.Array], Rotation | None]:
        """Returns what gives each of these layers, by its number (int32), its rotation: of equally
        many dimensions, or None where none of them has one.
        """
        ropes = [self._ropes_L[layer] for layer in layers]
        kinds = list(dict.fromkeys(ropes))
        rotated = [rope for rope in kinds if rope is not None]
        if not rotated:
            return lambda number: None
        interleaved = rotated[0].interleaved
        cos, sin = self._tables[rotated[0]]
        if len(kinds) == 1:
            rotation = Rotation(cos, sin, interleaved)
            return lambda number: rotation
        unmoved = jnp.ones_like(cos), jnp.zeros_like(sin)
        tables = [unmoved if rope is None else self._tables[rope] for rope in kinds]
        stacked = jax.tree.map(lambda *x: jnp.stack(x), *tables)
        kind_L = np.zeros(len(self._ropes_L), np.int32)
        kind_L[list(layers)] = [kinds.index(rope) for rope in ropes]

        def pick(number: jax.Array) -> Rotation:
            kind = jnp.asarray(kind_L)[number]
            return Rotation(stacked[0][kind], stacked[1][kind], interleaved)

        return pick


def rope_frequencies(rope: RopeSpec, head_dim: int) -> np.ndarray:
    """Computes the inverse frequencies [dim/2] float32 of sequences that are no longer than what
    the model was made for.

    Raises: ValueError for a rope kind that is not known.
    """
    dim = rope.dim or head_dim
    if rope.kind == "yarn":
        inv_freq = yarn_inv_freq(
            rope.theta,
            dim,
            factor=rope.factor,
            original_max_len=rope.original_max_len,
            beta_fast=rope.beta_fast,
            beta_slow=rope.beta_slow,
            truncate=rope.truncate,
        )
        return -inv_freq if rope.reverse else inv_freq
    inv_freq = default_inv_freq(rope.theta, dim)
    if rope.kind == "linear":
        inv_freq = (inv_freq / np.float32(rope.factor)).astype(np.float32)
    elif rope.kind == "longrope":
        inv_freq = (inv_freq / np.array(rope.short_factors, np.float32)).astype(np.float32)
    elif rope.kind == "llama3":
        inv_freq = llama3_inv_freq(
            inv_freq,
            factor=rope.factor,
            low_freq_factor=rope.low_freq_factor,
            high_freq_factor=rope.high_freq_factor,
            original_max_len=rope.original_max_len,
        )
    elif rope.kind == "proportional":
        inv_freq = proportional_inv_freq(rope.theta, dim, rope.part, rope.factor)
    elif rope.kind not in ("default", "dynamic"):
        raise ValueError(f"rope kind: expected one that is known, got {rope.kind!r}")
    return -inv_freq if rope.reverse else inv_freq


def _frequencies_in_context(rope: RopeSpec, context_T: jax.Array) -> jax.Array:
    """Computes the inverse frequencies [T, dim/2] of tokens whose sequences may get so long, by a
    rope that says its `dim`.
    """
    dim, sign = rope.dim, -1 if rope.reverse else 1
    if rope.kind == "longrope":
        long = sign * default_inv_freq(rope.theta, dim) / np.array(rope.long_factors, np.float32)
        is_long_T1 = context_T[:, None] > rope.original_max_len
        return jnp.where(is_long_T1, long[None], rope_frequencies(rope, dim)[None])
    longest_T = jnp.maximum(context_T, rope.original_max_len).astype(jnp.float32)
    grown_T = rope.factor * longest_T / rope.original_max_len - (rope.factor - 1)
    theta_T = rope.theta * grown_T ** (dim / (dim - 2))
    exponent = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    return sign * theta_T[:, None] ** -exponent[None]
