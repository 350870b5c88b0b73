"""Turns positions of a step's rows into ranges of slots, and numbers per row into lists of work:
all schedules share it.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp


@dataclass(frozen=True, slots=True)
class Rows:
    """Says what each row of a step holds with the step's own tokens included, and which packed
    tokens are its own.

    Rows list their slots by rising position, so what a query sees of its row (causal, window,
    dropped pages) is one range of slots.

    window, in tokens: None is no window, and its schedule says nothing of one. Any other, an int
    or a traced int32 from 1 to 2**30, is data: schedules that differ in it only can be stacked.
    With 2**30 a query sees all that comes before it.
    """

    table_BW: jax.Array
    first_BW: jax.Array
    len_B: jax.Array
    start_B: jax.Array
    count_B: jax.Array
    page_size: int
    window: int | jax.Array | None

    @property
    def width(self) -> int:
        return self.table_BW.shape[1]

    def position(self, row: jax.Array, slot: jax.Array) -> jax.Array:
        slot = jnp.maximum(slot, 0)
        page = jnp.minimum(slot // self.page_size, self.width - 1)
        return self.first_BW[row, page] + slot % self.page_size

    def lowest(self, row: jax.Array, slot: jax.Array) -> jax.Array | None:
        """Returns the lowest position that the query at `slot` of its row sees, below 0 where its
        window is longer than what comes before it; None without a window.
        """
        if self.window is None:
            return None
        return self.position(row, slot) + 1 - jnp.asarray(self.window, jnp.int32)

    def low_slot(self, row: jax.Array, slot: jax.Array) -> jax.Array:
        """Finds the first slot of its row that the query at `slot` sees."""
        lowest = self.lowest(row, slot)
        if lowest is None:
            return jnp.zeros_like(slot)
        below = lowest[:, None] - self.first_BW[row]
        held = (jnp.arange(self.width, dtype=jnp.int32) * self.page_size)[None, :] <= slot[:, None]
        return jnp.where(held, jnp.clip(below, 0, self.page_size), 0).sum(axis=1, dtype=jnp.int32)


def expand(num_B: jax.Array, size: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns (total [1], row, index within the row) of `size` list entries, num_B[r] of them row
    r's; past the total: last.
    """
    end_B = jnp.cumsum(num_B, dtype=jnp.int32)
    entry = jnp.minimum(jnp.arange(size, dtype=jnp.int32), jnp.maximum(end_B[-1] - 1, 0))
    row = jnp.minimum(
        jnp.searchsorted(end_B, entry, side="right", method="compare_all"), num_B.shape[0] - 1
    )
    return end_B[-1:], row.astype(jnp.int32), entry - (end_B - num_B)[row]


def cdiv(a: jax.Array, b: int) -> jax.Array:
    return (a + b - 1) // b


def first_rows(decoded: jax.Array, filled: jax.Array, num_decode: jax.Array) -> jax.Array:
    """Joins [T, ...]: decode rows are the first packed tokens, every other token is a chunk's."""
    is_decode = jnp.arange(filled.shape[0]) < num_decode
    decoded = jnp.pad(
        decoded, ((0, filled.shape[0] - decoded.shape[0]), *[(0, 0)] * (decoded.ndim - 1))
    )
    return jnp.where(is_decode.reshape(-1, *[1] * (filled.ndim - 1)), decoded, filled)
