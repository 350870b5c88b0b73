"""Hashes of n-grams are those of whole numbers of 64 bits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.ops.ngrams import table_rows

VOCAB = 248_320


@pytest.mark.parametrize("least", [2, 90, 20_000_000, 2**30, 2**31 - 40])
def test_rows_are_what_whole_numbers_of_64_bits_leave(least):
    rng = np.random.default_rng(0)
    multipliers = [int(x) | 1 for x in rng.integers(1, (2**63 - 1) // VOCAB, 3)]
    sizes = [least + int(x) for x in rng.integers(0, 39, 4)]
    token_TN = rng.integers(0, VOCAB, (50, 3)).astype(np.int32)
    token_TN[0], token_TN[1] = 0, VOCAB - 1
    rows = jax.jit(lambda x: table_rows(x, multipliers, sizes))(jnp.asarray(token_TN))
    for tokens, got in zip(token_TN.tolist(), np.asarray(rows).view(np.uint32), strict=True):
        first, second, third = (a * b for a, b in zip(tokens, multipliers, strict=True))
        mixed = [first ^ second] * 2 + [first ^ second ^ third] * 2
        begins = np.cumsum([0, *sizes[:-1]])
        want = [x % size + int(begin) for x, size, begin in zip(mixed, sizes, begins, strict=True)]
        assert got.tolist() == [x % 2**32 for x in want]
