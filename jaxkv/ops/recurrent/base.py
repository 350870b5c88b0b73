"""Defines what a recurrent rule is.

A rule is one file here. What it promises:
- `step` and `block` compute the same: a block is so many steps of one row;
- a token whose inputs are all 0 leaves the state as it is, to the bit: that is how the driver fills
  a block that has fewer tokens;
- states and sums are float32.
"""

from __future__ import annotations

from typing import Any, Protocol

import jax
import jax.numpy as jnp

from jaxkv.axes import Array


class Rule(Protocol):
    """Says how tokens change a row's state and what they read of it. Inputs are a pytree of arrays
    with the tokens in front.
    """

    @property
    def block_len(self) -> int:
        """Returns how many tokens of a row `block` takes best."""
        ...

    def step(self, state_R: Array, inputs_R: Any) -> tuple[Array, Array]:
        """Takes one token of each row: returns the states after it and the outputs [R, ...]
        float32.
        """
        ...

    def block(self, state: Array, inputs_C: Any) -> tuple[Array, Array]:
        """Takes C tokens of one row at once, C a power of two: returns its state after them and the
        outputs [C, ...] float32.
        """
        ...


def einsum(how: str, *arrays: Array) -> Array:
    """Computes a product in float32: an error in a state stays there."""
    return jnp.einsum(how, *arrays, precision=jax.lax.Precision.HIGHEST)
