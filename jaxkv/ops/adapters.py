"""Adds low-rank adapters to what weights give, each token's own: y + (x A^T) B^T. Tokens without
an adapter cost nothing. Source: LoRA, arXiv 2106.09685, section 4.1.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxkv.axes import Array
from jaxkv.ops.matrices import AnyMatrix, Extended, Matrix, dot
from jaxkv.pytree import pytree

ROWS, MANY_ROWS = 16, 128
"""Tokens that an adapter takes at once, the second in steps of MANY_TOKENS and more."""

MANY_TOKENS = 512


@pytree
class TokenAdapters:
    """Says which tokens of a step go through which adapters, in blocks of one adapter each.

    slot_I    int32: where the adapter of each block is among those on the device.
    token_IR  int32: the tokens of each block, the number of all tokens for no token.
    num_blocks  int32: the blocks that there are.
    """

    slot_I: Array
    token_IR: Array
    num_blocks: Array

    @classmethod
    def of(cls, slot_T: Array, num_slots: int) -> TokenAdapters:
        """Sorts tokens by the slots of their adapters; from `num_slots` on a token has none."""
        num_tokens = slot_T.shape[0]
        num_rows = MANY_ROWS if num_tokens >= MANY_TOKENS else ROWS
        order_T = jnp.argsort(slot_T, stable=True).astype(jnp.int32)
        size_A = jnp.zeros(num_slots, jnp.int32).at[slot_T].add(1, mode="drop")
        start_A, blocks_A = jnp.cumsum(size_A) - size_A, -(-size_A // num_rows)
        end_A = jnp.cumsum(blocks_A)
        most = -(-num_tokens // num_rows) + min(num_slots, num_tokens)
        block_I = jnp.arange(most, dtype=jnp.int32)
        slot_I = jnp.minimum(jnp.searchsorted(end_A, block_I, side="right"), num_slots - 1)
        begin_I = (block_I - end_A[slot_I] + blocks_A[slot_I]) * num_rows
        place_IR = begin_I[:, None] + jnp.arange(num_rows, dtype=jnp.int32)[None]
        place_IR = jnp.where(place_IR < size_A[slot_I][:, None], place_IR, num_tokens)
        token_IR = order_T.at[place_IR + start_A[slot_I][:, None]].get(
            mode="fill", fill_value=num_tokens
        )
        token_IR = jnp.where(place_IR < num_tokens, token_IR, num_tokens)
        return cls(slot_I.astype(jnp.int32), token_IR, end_A[-1])


@pytree
class Adapted(Extended):
    """A weight [F, D] of a layer to which each token's adapter adds its own: `down` and `up` are of
    all adapters on the device, [L, A, X, D] and [L, A, F, X] for X the largest rank.
    """

    base: AnyMatrix
    down: Array
    up: Array
    layer: Array
    adapters: TokenAdapters

    def dot(self, x_TD: Array, start: int | Array, num_rows: int) -> Array:
        """Multiplies with so many rows: [T, num_rows] float32."""
        y_TC = self.base.dot(x_TD, start, num_rows)
        return self.added_to(y_TC, x_TD, first_row=start)

    def dot_columns(self, x_TC: Array, start: int | Array) -> Array:
        """Multiplies with as many columns as x has: [T, F] float32."""
        return self.added_to(self.base.dot_columns(x_TC, start), x_TC, first_column=start)

    def added_to(
        self,
        y_TF: Array,
        x_TD: Array,
        *,
        first_row: int | Array = 0,
        first_column: int | Array = 0,
    ) -> Array:
        """Adds to y what the adapters make of x, both from such a row and column of the weight on.
        Cost: an adapter is read once for each block of its tokens.
        """
        own = self.adapters

        def block(i: Array, y_TF: Array) -> Array:
            token_R, place = own.token_IR[i], (self.layer, own.slot_I[i])
            down, up = Matrix(self.down, place), Matrix(self.up, place)
            x_RD = x_TD.at[token_R].get(mode="fill", fill_value=0).astype(down.dtype)
            y_RX = dot(x_RD, down.columns(first_column, x_TD.shape[1]))
            y_RF = up.dot(y_RX, first_row, y_TF.shape[1])
            return y_TF.at[token_R].add(y_RF, mode="drop")

        return jax.lax.fori_loop(0, own.num_blocks, block, y_TF)
