"""Says where the rows of a step keep their recurrent states."""

from __future__ import annotations

from typing import NamedTuple

import jax

from jaxkv.ops.attention import Batch


class Rows(NamedTuple):
    """Says where the rows of a step find the states of one layer.

    slot_B     int32: the slot of each row among `num_slots`; `num_slots` of a row without tokens in
               this step, whose state must stay as it is wherever it is.
    len_B      int32: tokens of each row before this step. A row with none begins with zeros,
               whatever its slot holds.
    batch      the packed tokens.
    layer      int32: number among the layers that keep such states. Slot s of layer l is row
               l * num_slots + s of an array of states.
    """

    slot_B: jax.Array
    len_B: jax.Array
    batch: Batch
    layer: jax.Array
    num_slots: int
