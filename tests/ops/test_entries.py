"""Attention to the last tokens one by one and to older ones by entries, beside the same sums in
float64.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cases import NUM_ROWS, Case, Shape, decode, only_layer, step_case
from jaxkv.kv.codecs import get_codec
from jaxkv.kv.layout import HeadMajorLayout, LaneRowsLayout
from jaxkv.kv.state import empty_store, write, write_entries
from jaxkv.ops.attention import EntryShape, Index, xla

pytestmark = pytest.mark.usefixtures("quick_compile")

RANK, NEAR, RATE, CHOSEN = 24, 8, 4, 3
ENTRY = EntryShape(RATE, RANK + 6)


def expected(case: Case, index: Index | None, sinks_N: np.ndarray, scale: float) -> np.ndarray:
    """Attends each query to the rows that it sees and to the entries before it, [T, N, RANK]."""
    pages = np.asarray(decode(case.store.codec, case.store.pages), np.float64)[:, 0]
    out = np.zeros((*case.q_TNH.shape[:2], RANK))
    for t in np.flatnonzero(case.batch.row_T < NUM_ROWS):
        row, position = case.batch.row_T[t], case.batch.position_T[t]
        length, size = case.tables.len_B[row], case.store.page_size
        table, first = case.tables.table_BW[row], case.tables.first_BW[row]
        slot_J = np.arange(length)
        row_JX = pages[table[slot_J // size], slot_J % size]
        position_J = first[slot_J // size] + slot_J % size
        distance_J = position - position_J
        keys = [row_JX[(distance_J >= 0) & (distance_J < NEAR), :RANK]]
        count = length // RATE
        entry_CX = row_JX[: count * RATE, RANK:].reshape(count, -1)[:, : ENTRY.size]
        entry_CX = entry_CX[position_J[RATE - 1 :: RATE][:count] <= position]
        if index is not None:
            q_IH = np.asarray(index.q_TIH[t], np.float64)
            met_IC = np.maximum(q_IH @ entry_CX[:, RANK:].T, 0)
            score_C = np.asarray(index.weight_TI[t], np.float64) @ met_IC
            entry_CX = entry_CX[np.argsort(-score_C)[:CHOSEN]]
        keys = np.concatenate([*keys, entry_CX[:, :RANK]])
        q_NH = case.q_TNH[t, :, :RANK].astype(np.float64) * scale
        score_NJ = np.concatenate([q_NH @ keys.T, sinks_N[:, None]], axis=1)
        weight_NJ = np.exp(score_NJ - score_NJ.max(axis=1, keepdims=True))
        weight_NJ /= weight_NJ.sum(axis=1, keepdims=True)
        out[t] = weight_NJ[:, :-1] @ keys
    return out


@pytest.mark.parametrize(
    ("dtype", "chooses", "most"),
    [
        pytest.param("float32", False, 2e-5, marks=pytest.mark.slow),
        ("float32", True, 2e-5),
        pytest.param("bfloat16", True, 2e-2, marks=pytest.mark.slow),
    ],
)
def test_queries_meet_the_last_rows_and_the_entries_that_end_before_them(dtype, chooses, most):
    """In decode rows and chunks. Everything that no row holds is NaN."""
    rng = np.random.default_rng(0)
    case = step_case(4, Shape(16, None, 4, 1, RANK + 8, dtype), num_tokens=240)
    layout = replace(case.store.layout, latent_dim=RANK)
    store = only_layer(replace(case.store, pages=case.store.pages[:, :1], layout=layout), 1)
    case = case._replace(q_TNH=case.q_TNH * (np.arange(RANK + 8) < RANK))
    num_tokens, sinks_N = len(case.q_TNH), rng.normal(size=4)
    index = Index(
        q_TIH=jnp.asarray(rng.normal(size=(num_tokens, 16, 6)), jnp.float32),
        weight_TI=jnp.asarray(rng.normal(size=(num_tokens, 16)), jnp.float32),
        num_chosen=CHOSEN,
    )
    choice = index if chooses else None
    read = jax.jit(partial(xla.read, scale=0.3, window=NEAR, entry=ENTRY))
    at = case._replace(store=store).at(1)
    got, _ = read(case.q_TNH, at, case.batch, index=choice, sinks_N=jnp.asarray(sinks_N))
    of_layer = store.pages[store.num_pages :]  # the others hold NaN
    whole = case._replace(store=replace(store, pages=of_layer, num_layers=1))
    want = expected(whole, choice, sinks_N, 0.3)
    real_T = case.batch.row_T < NUM_ROWS
    np.testing.assert_allclose(np.asarray(got)[real_T], want[real_T], rtol=0, atol=most)


@pytest.mark.parametrize("kind", [HeadMajorLayout, LaneRowsLayout])
def test_entries_lie_behind_the_rows_of_their_tokens(kind):
    """Whatever is beside them stays, and an entry of no token is dropped."""
    rng, size, rank = np.random.default_rng(1), 8, 128
    codec = get_codec("float32", platform="cpu")
    layout = kind(num_kv_heads=1, head_dim=256, page_size=size, codec=codec, latent_dim=rank)
    store = empty_store(num_layers=2, layout=layout, num_pages=3)
    rows = jnp.asarray(rng.normal(size=(24, 1, 256)), jnp.float32)
    for layer in range(2):
        store = write(store, rows, None, dest_T=jnp.arange(24), layer=layer)
    entries = jnp.asarray(rng.normal(size=(3, 150)), jnp.float32)
    dest_E = jnp.asarray([7, 24, 19])
    store = write_entries(store, entries, dest_E=dest_E, rate=4, layer=1)
    want = np.stack([np.asarray(rows[:, 0])] * 2)
    for entry, last in ((0, 7), (2, 19)):
        part = np.pad(np.asarray(entries[entry]), (0, 2)).reshape(4, 38)
        want[1, last - 3 : last + 1, rank : rank + 38] = part
    if kind is LaneRowsLayout:  # whole rows of lanes are written
        for last in (7, 19):
            want[1, last - 3 : last + 1, rank + 38 :] = 0
    keys, _ = layout.unpack([store.pages.reshape(2, 3, *store.pages.shape[1:])])
    np.testing.assert_array_equal(np.asarray(keys)[:, :, 0], want)
    ends = layout.gather_ends(store.pages, jnp.asarray([3, 5]), rank)
    np.testing.assert_array_equal(ends, want[1].reshape(3, size, 256)[[0, 2], :, rank:])
