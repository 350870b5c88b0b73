"""Pages of a pool that have more than one array."""

from __future__ import annotations

from typing import NamedTuple

import jax


class Int8Pages(NamedTuple):
    """Holds numbers [L*P, 2K, S, H] int8 and scales [L*P, 1, 2K * S] bfloat16, head by head, by
    which their vectors are multiplied.
    """

    numbers: jax.Array
    scales: jax.Array
