"""The sizes that steps and loops are compiled for."""

from __future__ import annotations

SMALLEST_STEP = 16

FEWEST_ROWS = {"gpu": 8}
"""Rows of the smallest decode loop of a platform, else 2: a matmul of one bfloat16 row is an order
slower on XLA:CPU than one of two. On a GPU XLA pads fewer than 8, with a kernel before and after
each matmul.
"""

FEW_DRAWN = 8
"""Rows of the smaller of two draws."""


def token_buckets(max_num_batched_tokens: int) -> tuple[int, ...]:
    """Lists the packed-token counts T that a step is compiled for: the maximum, a quarter of it and
    so on, never below 16.

    Compiling is what users wait for first, so they are few. `Scheduler` fills smaller ones where
    the next larger one would be mostly padding.
    """
    sizes = [max(SMALLEST_STEP, max_num_batched_tokens)]
    while sizes[0] >= 4 * SMALLEST_STEP:
        sizes.insert(0, sizes[0] // 4)
    return tuple(sizes)


def row_buckets(max_num_seqs: int, platform: str = "cpu") -> tuple[int, ...]:
    """Lists the row counts that the decode loop is compiled for: the maximum, half of it and
    quarters of that, never below FEWEST_ROWS where that many may run.
    """
    fewest = min(FEWEST_ROWS.get(platform, 2), max(2, max_num_seqs))
    sizes = [max(fewest, max_num_seqs // 2)]
    while sizes[0] > 2 * fewest:
        sizes.insert(0, max(fewest, sizes[0] // 4))
    return (*sizes, max_num_seqs) if max_num_seqs > sizes[-1] else tuple(sizes)


def num_step_rows(max_num_seqs: int, num_tokens: int) -> int:
    """Returns the rows of the step program for T packed tokens: a row has at least one token. Never
    one row, see `linear`.
    """
    return min(max(2, max_num_seqs), num_tokens)


def drawn_rows(max_num_seqs: int) -> tuple[int, ...]:
    """Lists the row counts for which the draw behind a step is compiled: all, and few where that is
    much less, as most steps of prompts end.
    """
    most = max(2, max_num_seqs)
    return (FEW_DRAWN, most) if most >= 4 * FEW_DRAWN else (most,)


def fit_bucket(buckets: tuple[int, ...], size: int) -> int:
    """Returns the smallest bucket that holds `size`. Raises: ValueError if none does."""
    for bucket in buckets:
        if bucket >= size:
            return bucket
    raise ValueError(f"expected a size of at most {buckets[-1]}, got {size}")
