"""Gives programs on a CPU each layer's matrices as arrays of their own, which lie in the stacks:
nothing is copied for that, nor in the loop over layers.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.ops.layers import rows_of_pieces
from jaxkv.ops.matrices import Matrix, PerLayer
from jaxkv.weights.tree import Weights, per_layer


def abstract_layers(weights: Weights) -> Weights:
    """Returns the shapes of what `LayerArrays.of` gives, of shapes of stacked weights."""

    def split(leaf: Any) -> PerLayer:
        num_layers, _, width = leaf.shape
        w = Matrix(leaf)
        pieces = [
            jax.ShapeDtypeStruct((end - start, width), w.dtype, sharding=leaf.sharding)
            for start, end in rows_of_pieces(w)
        ]
        return PerLayer((tuple(pieces),) * num_layers)

    return per_layer(weights, split)


class LayerArrays:
    """Keeps the layers' arrays of stacked weights as long as those are used.

    An array of a layer holds the memory of its stack, which `forget` lets go.
    """

    def __init__(self) -> None:
        self._made: dict[int, tuple[jax.Array, PerLayer]] = {}
        """By the identity of the stack, which is beside them, so no other array has it."""

    def of(self, weights: Weights) -> Weights:
        """Returns the tree with arrays for each layer in place of stacks of bfloat16 matrices."""
        return per_layer(weights, self._split)

    def forget(self) -> None:
        self._made = {}

    def _split(self, stack: jax.Array) -> PerLayer:
        if id(stack) not in self._made:
            host, rows = np.asarray(stack).view(jnp.bfloat16), rows_of_pieces(Matrix(stack))
            pieces = [
                tuple(
                    jax.device_put(one[start:end], stack.sharding, may_alias=True)
                    for start, end in rows
                )
                for one in host
            ]
            self._made[id(stack)] = stack, PerLayer(tuple(pieces))
        return self._made[id(stack)][1]
