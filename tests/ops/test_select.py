"""Decoding queries read the pages whose keys could meet them best, and those as all of them are
read otherwise.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cases import (
    AS_USERS,
    NUM_LAYERS,
    NUM_ROWS,
    TOLERANCE,
    Case,
    Shape,
    contents,
    decode_case,
    scale_of,
    step_case,
)
from jaxkv.kv.codecs import get_codec
from jaxkv.kv.layout import HeadMajorLayout, LaneRowsLayout
from jaxkv.kv.state import PagedKV, copy_pages, empty_store, write
from jaxkv.ops.attention import xla
from tiers import some

# XLA attends, as it does where pages are chosen.
pytestmark = pytest.mark.usefixtures("quick_compile", "xla_attends")
READ = jax.jit(xla.read, static_argnames=("scale", "window"), compiler_options=AS_USERS)


def read(case: Case, layer: int) -> np.ndarray:
    at = case.at(layer)
    return np.asarray(READ(case.q_TNH, at, case.batch, scale=scale_of(case), window=None)[0])


SHAPES = [
    Shape(8, None, 4, 2, 16, "float32"),
    Shape(16, None, 6, 2, 16, "float32"),
    Shape(16, None, 3, 1, 64, "float32"),
]


def held_keys(case: Case) -> np.ndarray:
    """[L*P, S, K, H], NaN where no row of the case holds anything."""
    store, tables = case.store, case.tables
    keys = contents(store)[0]
    keys = keys.reshape(-1, *keys.shape[2:])
    owned_PS = np.zeros((store.num_pages, store.page_size), bool)
    for row, length in enumerate(tables.len_B):
        slots = np.arange(length)
        owned_PS[tables.table_BW[row, slots // store.page_size], slots % store.page_size] = True
    keys.reshape(NUM_LAYERS, *owned_PS.shape, *keys.shape[2:])[:, ~owned_PS] = np.nan
    return keys


def choosing(case: Case, num_read: int) -> Case:
    keys = held_keys(case)
    some = ~np.isnan(keys).all(axis=1, keepdims=True)
    least = np.where(some, np.where(np.isnan(keys), np.inf, keys), 0).min(axis=1)
    most = np.where(some, np.where(np.isnan(keys), -np.inf, keys), 0).max(axis=1)
    extremes = jnp.asarray(np.stack([least, most], axis=1), jnp.float32)
    extremes = jnp.where(jnp.asarray(some[:, :1]), extremes, jnp.nan)
    return case._replace(store=replace(case.store, extremes=extremes, num_read=num_read))


def wanted(case: Case, num_read: int, layer: int) -> np.ndarray:
    """Decode rows in float64, each KV head over the pages that a bound on its queries' scores
    chooses.
    """
    q_TNH, store, tables, batch = case
    size, out = store.page_size, np.zeros(case.q_TNH.shape)
    keys = held_keys(case).reshape(NUM_LAYERS, store.num_pages, size, store.num_kv_heads, -1)[layer]
    values = contents(store)[1, layer]
    for row in np.flatnonzero(tables.len_B[: int(batch.num_decode)]):
        length = int(tables.len_B[row])
        table = tables.table_BW[row, : -(-length // size)]
        for head, q_GH in enumerate(np.split(q_TNH[row].astype(np.float64), store.num_kv_heads)):
            bounds = []
            for w, page in enumerate(table):
                own = keys[page, : min(size, length - w * size), head]
                bound = np.maximum(q_GH * own.min(axis=0), q_GH * own.max(axis=0)).sum(axis=1).max()
                bounds.append(np.inf if w in (0, len(table) - 1) else bound)
            read = np.argsort(bounds)[::-1][:num_read]
            slots = [(table[w], slice(0, min(size, length - w * size))) for w in read]
            k, v = (
                np.concatenate([x[page, inside, head] for page, inside in slots])
                for x in (keys, values)
            )
            scores = scale_of(case) * q_GH @ k.T
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            group_out = weights / weights.sum(axis=1, keepdims=True) @ v
            out[row, head * len(q_GH) : (head + 1) * len(q_GH)] = group_out
    return out


CHOSEN = list(itertools.product(SHAPES, (2, 5)))


@pytest.mark.parametrize(("shape", "num_read"), some(CHOSEN, CHOSEN[0], CHOSEN[3]), ids=str)
def test_decode_rows_read_the_pages_that_a_bound_on_their_scores_chooses(shape, num_read):
    case = decode_case(3, shape)
    got = read(choosing(case, num_read), 1)
    live = (case.batch.count_B > 0) & (case.tables.len_B > 0)
    assert np.abs(got - wanted(case, num_read, 1))[live].max() <= TOLERANCE
    assert np.abs(got - read(case, 1))[live].max() > 100 * TOLERANCE


def test_where_every_page_may_be_read_no_bit_changes_and_chunks_read_all_anyway():
    case = decode_case(3, SHAPES[0])
    width = case.tables.table_BW.shape[1]
    real_T = case.batch.row_T < NUM_ROWS
    np.testing.assert_array_equal(*(read(one, 1)[real_T] for one in (case, choosing(case, width))))
    case = step_case(1, SHAPES[0], num_tokens=64)
    chunk_T = (case.batch.row_T < NUM_ROWS) & (case.batch.row_T >= case.batch.num_decode)
    np.testing.assert_array_equal(*(read(one, 1)[chunk_T] for one in (case, choosing(case, 2))))


def on_lanes(case: Case) -> Case:
    """The case with its pages as rows of registers, unheld slots' numbers too."""
    own = case.store.layout
    sizes = {"num_kv_heads": own.num_kv_heads, "head_dim": own.head_dim, "page_size": own.page_size}
    layout = LaneRowsLayout(codec=own.codec, **sizes)
    pages = np.asarray(case.store.pages)  # [L*P, V, S, X]
    by_token = pages.swapaxes(1, 2).reshape(len(pages), own.page_size, -1)
    (like,) = layout.arrays
    lanes = np.zeros((len(pages), own.page_size, like.shape[0] * like.shape[2]), pages.dtype)
    lanes[..., : by_token.shape[2]] = by_token
    rows = lanes.reshape(len(pages), own.page_size, *like.shape[::2]).swapaxes(1, 2)
    return case._replace(store=replace(case.store, pages=jnp.asarray(rows), layout=layout))


@pytest.mark.parametrize("dtype", some(["float32", "int8", "turboquant4"], "int8"))
def test_pages_that_are_rows_of_registers_give_the_same_bits_chosen_by_head_or_not(dtype):
    shape = Shape(8, None, 6, 3, 32, dtype)
    for case in (decode_case(3, shape), step_case(1, shape, num_tokens=64)):
        real_T = case.batch.row_T < NUM_ROWS
        np.testing.assert_array_equal(*(read(one, 1)[real_T] for one in (case, on_lanes(case))))
    case = choosing(decode_case(3, SHAPES[0]), 2)
    np.testing.assert_array_equal(*(read(one, 1) for one in (case, on_lanes(case))))


@pytest.mark.parametrize("dtype", some(["float32", "bfloat16", "int8"], "int8"))
def test_extremes_are_those_of_the_keys_that_a_page_holds(dtype):
    """Through writes in pieces, pages that begin anew, and copies."""
    rng, codec, (pages, size, heads, head_dim) = (
        np.random.default_rng(2),
        get_codec(dtype, platform="cpu"),
        (5, 8, 2, 16),
    )
    layout = HeadMajorLayout(num_kv_heads=heads, head_dim=head_dim, page_size=size, codec=codec)
    extremes = jnp.full((2 * pages, 2, heads, head_dim), jnp.nan)
    store = empty_store(num_layers=2, layout=layout, num_pages=pages)
    store = replace(store, extremes=extremes, num_read=2)
    filled = np.zeros(pages, int)
    for _ in range(30):
        page = int(rng.integers(0, pages - 1))
        filled[page] = 0 if filled[page] == size else filled[page]
        count = int(rng.integers(1, size - filled[page] + 1))
        dest = page * size + filled[page] + np.arange(count)
        filled[page] += count
        dest = np.append(dest, [pages * size] * (size + 1 - count)).astype(np.int32)  # and padding
        k, v = rng.normal(size=(2, len(dest), heads, head_dim)).astype(np.float32)
        store = jax.jit(write)(store, k, v, dest_T=dest, layer=1)
    source = int(np.argmax(filled[:-1]))
    (store,) = copy_pages(PagedKV((store,)), jnp.asarray([source]), jnp.asarray([pages - 1])).stores
    filled[pages - 1] = filled[source]
    keys = contents(store)[0, 1]
    for page in np.flatnonzero(filled):
        own = keys[page, : filled[page]]
        np.testing.assert_array_equal(
            store.extremes[pages + page], np.stack([own.min(axis=0), own.max(axis=0)])
        )
