"""What a query sees of its row, as a range of slots, equals what its window says slot by slot."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.kv.state import BEHIND
from kernels_pallas.rows import Rows

SIZE, WIDTH, LONGEST = 16, 5, 2**20


def random_tables(rng: np.random.Generator, num_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """First positions, by pages or more from one to the next up to very large ones, some columns
    in front without a page; and lengths that end behind those.
    """
    gaps = rng.choice([1, 1, 3, LONGEST // SIZE], (num_rows, WIDTH))
    first_BW = np.cumsum(gaps, axis=1) * SIZE
    behind_B = rng.integers(0, 3, num_rows)
    first_BW[np.arange(WIDTH)[None] < behind_B[:, None]] = BEHIND
    return first_BW, rng.integers(behind_B * SIZE + 1, WIDTH * SIZE + 1)


@pytest.mark.parametrize("window", [1, 20, LONGEST, 2**30])
def test_the_range_of_slots_is_what_the_window_lets_a_query_see(window):
    first_BW, len_B = random_tables(np.random.default_rng(0), 200)
    first = jnp.asarray(first_BW, jnp.int32)
    slot_B, row_B = len_B - 1, np.arange(len(len_B))

    @jax.jit
    def low_slot(window):
        rows = Rows(first, first, slot_B, slot_B, slot_B, SIZE, window)
        return rows.low_slot(jnp.asarray(row_B, jnp.int32), jnp.asarray(slot_B, jnp.int32))

    key_BJ = (first_BW[:, :, None] + np.arange(SIZE)).reshape(len(len_B), -1)  # int64
    own_B1 = key_BJ[row_B, slot_B][:, None]
    before = np.arange(WIDTH * SIZE)[None] <= slot_B[:, None]
    hidden = (before & (own_B1 - key_BJ >= window)).sum(axis=1)
    np.testing.assert_array_equal(low_slot(window), hidden)
