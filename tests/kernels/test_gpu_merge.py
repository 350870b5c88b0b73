"""The kernel that merges the partial softmaxes of decode gives the softmax over all of a row's
scores, of which each part has some.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.gpu.decode import Partial
from kernels_pallas.gpu.merge import merge
from kernels_pallas.gpu.schedule import DecodeItems

KV_HEADS, HEAD_DIM, PER_HEAD, KEYS = 2, 64, 16, 5
PARTS = (1, 0, 19, 8)
"""Of each row: none, fewer than are read at once, as many, and more."""


def items_of(parts: tuple[int, ...]) -> DecodeItems:
    first, nothing = np.cumsum((0, *parts[:-1])), jnp.zeros(1, jnp.int32)
    return DecodeItems(
        num=nothing,
        row=nothing,
        begin=nothing,
        tiles=nothing,
        low=nothing,
        high=nothing,
        first=jnp.asarray(first, jnp.int32),
        parts=jnp.asarray(parts, jnp.int32),
        table=nothing,
        num_rows=len(parts),
        width=1,
    )


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("group", [12, 16])
def test_parts_of_rows_become_one_softmax(group, has_sinks):
    rng = np.random.default_rng(group)
    num_items = sum(PARTS) + 3
    score = rng.normal(0, 6, (num_items, KV_HEADS, PER_HEAD, KEYS))
    value = rng.normal(size=(num_items, KV_HEADS, KEYS, HEAD_DIM))
    top = score.max(axis=-1)
    weight = np.exp2(score - top[..., None])
    sums = np.einsum("ikmj,ikjh->ikhm", weight, value)
    found = [x.astype(np.float32) for x in (sums, top, weight.sum(axis=-1))]
    for x in found:
        x[sum(PARTS) :] = np.nan  # which no unit has written
    sinks = rng.normal(0, 6, (KV_HEADS, group)) if has_sinks else None

    items, out_dtype = items_of(PARTS), jnp.float32
    sinks_KG = None if sinks is None else jnp.asarray(sinks, jnp.float32)
    got = merge(
        Partial(*map(jnp.asarray, found)),
        items,
        sinks_KG,
        group=group,
        dtype=out_dtype,
        interpret=True,
    )

    want = np.zeros((len(PARTS), KV_HEADS, group, HEAD_DIM))
    for row, (first, count) in enumerate(zip(np.asarray(items.first), PARTS, strict=True)):
        own = slice(first, first + count)
        if count:
            whole = np.exp2(score[own, :, :group])
            total = whole.sum(axis=(0, 3)) + (0 if sinks is None else np.exp2(sinks))
            of_row = np.einsum("ikmj,ikjh->kmh", whole, value[own])
            want[row] = of_row / total[..., None]
    np.testing.assert_allclose(got, want, atol=2e-6)
