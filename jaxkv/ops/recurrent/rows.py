"""Says where the rows of a step keep their recurrent states, reads and writes them."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxkv.axes import Array
from jaxkv.ops.attention import Batch

NOWHERE = 2**31 - 1
"""An index past every array of states: what is read there is anything, what is written is
dropped.
"""


class Rows(NamedTuple):
    """Says where the rows of a step find the states of one layer.

    slot_B     int32: the slot of each row among `num_slots`; `num_slots` of a row without tokens in
               this step, whose state must stay as it is wherever it is.
    len_B      int32: tokens of each row before this step. A row with none begins with zeros,
               whatever its slot holds.
    batch      the packed tokens.
    layer      int32: number among the layers that keep such states. Slot s of layer l is row
               l * num_slots + s of an array of states.
    after_BA   int32: the slots that get the state after each of a row's tokens, in place of its
               own; a row has at most A tokens then. None: its own slot gets that after the last.
    """

    slot_B: jax.Array
    len_B: jax.Array
    batch: Batch
    layer: jax.Array
    num_slots: int
    after_BA: jax.Array | None = None

    @property
    def index_B(self) -> Array:
        """Returns where in an array of states each row's is: NOWHERE for rows without tokens."""
        is_here = (self.slot_B < self.num_slots) & (self.batch.count_B > 0)
        return jnp.where(is_here, self.layer * self.num_slots + self.slot_B, NOWHERE)

    @property
    def written_BA(self) -> Array:
        """Returns where those after each token go: NOWHERE behind a row's last one. One column, for
        that after the last, where only that is stored.
        """
        if self.after_BA is None:
            return self.index_B[:, None]
        is_token_BA = jnp.arange(self.after_BA.shape[1])[None] < self.batch.count_B[:, None]
        is_token_BA &= self.index_B[:, None] < NOWHERE
        return jnp.where(is_token_BA, self.layer * self.num_slots + self.after_BA, NOWHERE)

    @property
    def is_new_B(self) -> Array:
        return self.len_B == 0


def read(pool: Array, index_R: Array, is_new_R: Array) -> Array:
    """Returns the states of some rows in float32, zeros for new ones."""
    state_R = pool.at[index_R].get(mode="clip").astype(jnp.float32)
    return jnp.where(is_new_R.reshape(-1, *[1] * (pool.ndim - 1)), 0, state_R)


def write(pool: Array, index_R: Array, state_R: Array) -> Array:
    """Returns the array with new states of some rows."""
    return pool.at[index_R].set(state_R.astype(pool.dtype), mode="drop")
