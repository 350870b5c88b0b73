"""Blocks of tokens of one adapter each add what a dense product for every token does."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.ops.adapters import MANY_TOKENS, ROWS, Adapted, TokenAdapters
from jaxkv.ops.layers import linear
from jaxkv.ops.matrices import Matrix

SLOTS, LAYERS, RANK, ROWS_F, COLUMNS = 3, 2, 4, 6, 10


@pytest.mark.parametrize("num_tokens", [2, ROWS, 3 * ROWS + 1, MANY_TOKENS + 30])
def test_each_token_goes_through_its_own_adapter(num_tokens):
    rng = np.random.default_rng(num_tokens)
    shapes = ((num_tokens, COLUMNS), (LAYERS, ROWS_F, COLUMNS))
    shapes += ((LAYERS, SLOTS, RANK, COLUMNS), (LAYERS, SLOTS, ROWS_F, RANK))
    x, base, down, up = (rng.normal(size=shape).astype(np.float32) for shape in shapes)

    @jax.jit
    def run(x_TD, slot_T):
        adapters = TokenAdapters.of(slot_T, SLOTS)
        weight = Matrix(jnp.asarray(base), jnp.int32(1))
        w = Adapted(weight, jnp.asarray(down), jnp.asarray(up), jnp.int32(1), adapters)
        parts = (w.dot(x_TD, 2, 3), w.dot_columns(x_TD[:, 4:8], 4))
        return linear(x_TD, w), *parts, linear(x_TD, weight)

    for slots in (
        rng.integers(0, SLOTS + 1, num_tokens),
        np.full(num_tokens, SLOTS),
        np.full(num_tokens, 1),
    ):
        slot_T = slots.astype(np.int32)
        whole, rows, columns, plain = (np.asarray(y) for y in run(x, slot_T))
        with_none = (np.concatenate([a[1], np.zeros_like(a[1, :1])]) for a in (down, up))
        own_down, own_up = (a[slot_T].astype(np.float64) for a in with_none)
        weights = base[1] + own_up @ own_down
        for got, want in (
            (whole, np.einsum("tfd,td->tf", weights, x)),
            (rows, np.einsum("tfd,td->tf", weights[:, 2:5], x)),
            (columns, np.einsum("tfd,td->tf", weights[:, :, 4:8], x[:, 4:8])),
        ):
            np.testing.assert_allclose(got, want, atol=2e-5)
        is_plain = slot_T == SLOTS
        np.testing.assert_array_equal(whole[is_plain], plain[is_plain])
