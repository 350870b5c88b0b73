"""Pages of a pool that have more than one array."""

from __future__ import annotations

from typing import NamedTuple

import jax

HEAD_DIMS = (64, 128, 256)


def padded_head_dim(head_dim: int) -> int:
    """Returns the smallest head size that the kernels take and that is at least as large; one that
    is larger than all of them as it is.
    """
    return min((size for size in HEAD_DIMS if size >= head_dim), default=head_dim)


class Int8Pages(NamedTuple):
    """Holds numbers [L*P, 2K, S, H] int8 and scales [L*P, 1, 2K * S] bfloat16, head by head, by
    which their vectors are multiplied.
    """

    numbers: jax.Array
    scales: jax.Array
