"""Attention over two pools equals attention over one, and what it says of pages is what the oracle
says in float64.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cases import (
    NUM_ROWS,
    TOLERANCE,
    Case,
    Shape,
    decode,
    decode_case,
    encode,
    scale_of,
    step_case,
)
from jaxkv.kv.codecs import get_codec
from jaxkv.kv.layout import HeadMajorLayout
from jaxkv.kv.policies.page_norm import mean_lengths
from jaxkv.kv.state import (
    PagedKV,
    PageTables,
    Statistics,
    demote,
    empty_store,
    measure_pages,
)
from jaxkv.ops.attention import Place, xla
from kernels_pallas import reference
from tiers import some

STATIC = ("scale", "window")
# XLA attends, as it does where it is observed.
pytestmark = pytest.mark.usefixtures("quick_compile", "xla_attends")
READ = jax.jit(xla.read, static_argnames=STATIC)
ORACLE = jax.jit(reference.ragged_paged_attention, static_argnames=(*STATIC, "num_pages"))
SHAPES = [
    Shape(8, None, 4, 2, 16, "float32"),
    Shape(16, 40, 6, 2, 16, "float32"),
    Shape(128, None, 3, 1, 64, "float32"),
]
CASES = {"step": partial(step_case, num_tokens=96), "decode": decode_case}


def divided(case: Case, seed: int) -> tuple[Case, np.ndarray]:
    """The same tokens with some full pages of every row in `low`, in a pool of the same pages, and
    where each page of the old table went: its index in the table of the store, or -1 - its index in
    that of `low`.
    """
    rng, store, whole = np.random.default_rng(seed), case.store, case.tables
    size, tables = store.page_size, [np.zeros_like(whole.table_BW) for _ in range(4)]
    place_BW, lengths = (
        np.zeros_like(whole.table_BW),
        [np.zeros_like(whole.len_B) for _ in range(2)],
    )
    for row in range(NUM_ROWS):
        old = int(whole.len_B[row]) - int(case.batch.count_B[row])
        goes = (rng.random(whole.table_BW.shape[1]) < 0.4) & (
            np.arange(whole.table_BW.shape[1]) < old // size
        )
        for is_low, (table, first) in ((False, tables[:2]), (True, tables[2:])):
            chosen = np.flatnonzero(goes == is_low)
            table[row, : len(chosen)] = whole.table_BW[row, chosen]
            first[row, : len(chosen)] = whole.first_BW[row, chosen]
            place_BW[row, chosen] = (
                -1 - np.arange(len(chosen)) if is_low else np.arange(len(chosen))
            )
        lengths[1][row] = goes.sum() * size
        lengths[0][row] = whole.len_B[row] - lengths[1][row]
    low = PageTables(tables[2], tables[3], lengths[1])
    divided_tables = PageTables(tables[0], tables[1], lengths[0], low=low)
    return case._replace(store=replace(store, low=store), tables=divided_tables), place_BW


def observed_at(case: Case, layer: int, since_B: np.ndarray, *, focused: bool = False) -> Place:
    """The place of a layer whose queries are observed from these positions on, entropies too."""
    zeros = np.zeros(case.tables.table_BW.shape, np.float32)
    low = None if case.tables.low is None else zeros
    tables = replace(case.tables, since_B=since_B.astype(np.int32), focused=focused)
    statistics = Statistics(zeros, low, zeros[:, 0], focused=focused)
    return case._replace(tables=tables).at(layer, statistics)


def wanted(
    case: Case, since_B: np.ndarray, *, layer: int, window: int | None, focused: bool
) -> tuple[np.ndarray, ...]:
    """(out, mass [B, W], entropy [B]) by the float64 oracle, over the tables of one pool."""
    q_TNH, store, tables, batch = case
    pages = np.asarray(decode(store.codec, store.pages), np.float64)
    with jax.enable_x64(True):
        out, found = ORACLE(
            q_TNH.astype(np.float64),
            pages,
            tables.table_BW,
            tables.first_BW,
            tables.len_B,
            batch.row_T,
            batch.position_T,
            layer=layer,
            num_pages=store.num_pages,
            scale=scale_of(case),
            window=window,
        )
        out, found = np.asarray(out), jax.tree.map(np.asarray, found)
    entropy_TN = np.log(np.maximum(found.sum_TN, 1)) - found.entropy_TN / np.maximum(
        found.sum_TN, 1
    )
    row_T = np.minimum(batch.row_T, NUM_ROWS - 1)
    slot_J = np.arange(tables.table_BW.shape[1] * store.page_size)
    position_TJ = (
        np.repeat(tables.first_BW, store.page_size, axis=1)[row_T] + slot_J % store.page_size
    )
    distance_TJ = batch.position_T[:, None] - position_TJ
    seen_TJ = (
        (slot_J < tables.len_B[row_T][:, None])
        & (distance_TJ >= 0)
        & (distance_TJ < (window or np.inf))
    )
    most_T = np.log(np.maximum(seen_TJ.sum(axis=1), 2))
    weight_TN = (
        np.clip(1 - entropy_TN / most_T[:, None], 0, 1) if focused else np.ones_like(entropy_TN)
    )
    mass_BW, entropy_B = np.zeros(tables.table_BW.shape), np.zeros(NUM_ROWS)
    for t, row in enumerate(batch.row_T):
        if row < NUM_ROWS and batch.position_T[t] >= since_B[row]:
            mass_BW[row] += weight_TN[t] @ found.mass_TNW[t]
            entropy_B[row] += entropy_TN[t].sum()
    return out, mass_BW, entropy_B


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize(
    ("shape", "focused"),
    some(zip(SHAPES, (True, False, True), strict=True), (SHAPES[0], True)),
    ids=str,
)
def test_mass_and_entropy_equal_float64_over_one_pool_and_over_two(kind, shape, focused):
    case = CASES[kind](SHAPES.index(shape), shape)
    rng = np.random.default_rng(5)
    since_B = rng.integers(0, np.maximum(case.tables.len_B, 1)) * (np.arange(NUM_ROWS) % 2)
    window = shape.window
    out, mass_BW, entropy_B = wanted(case, since_B, layer=1, window=window, focused=focused)
    real_T = case.batch.row_T < NUM_ROWS
    two, place_BW = divided(case, 7)
    for one, place in (
        (case, np.broadcast_to(np.arange(mass_BW.shape[1]), mass_BW.shape)),
        (two, place_BW),
    ):
        at = observed_at(one, 1, since_B, focused=focused)
        got, found = READ(one.q_TNH, at, one.batch, scale=scale_of(case), window=window)
        assert np.abs(np.asarray(got) - out)[real_T].max() <= TOLERANCE
        own, low = (
            np.asarray(found.mass_BW),
            None if found.low_BW is None else np.asarray(found.low_BW),
        )
        gathered = np.take_along_axis(own, np.maximum(place, 0), axis=1)
        if low is not None:
            gathered = np.where(
                place < 0, np.take_along_axis(low, np.maximum(-1 - place, 0), axis=1), gathered
            )
        queries = max(1, int(case.batch.count_B.max())) * shape.num_heads
        np.testing.assert_allclose(gathered, mass_BW, rtol=1e-5, atol=1e-6 * queries)
        np.testing.assert_allclose(
            np.asarray(found.entropy_B), entropy_B, rtol=1e-5, atol=1e-6 * queries
        )


@pytest.mark.parametrize("kind", CASES)
def test_asking_for_statistics_changes_no_bit_of_the_output(kind):
    case = CASES[kind](1, SHAPES[0])
    places = case.at(1), observed_at(case, 1, np.zeros(NUM_ROWS))
    options = {"scale": scale_of(case), "window": None}
    real_T = case.batch.row_T < NUM_ROWS
    np.testing.assert_array_equal(
        *(np.asarray(READ(case.q_TNH, at, case.batch, **options)[0])[real_T] for at in places)
    )


@pytest.mark.parametrize(
    ("of", "to"),
    some([("float32", "int8"), ("bfloat16", "int4"), ("int8", "int4")], ("bfloat16", "int4")),
)
def test_a_demoted_page_is_the_codec_of_what_the_page_holds_in_every_layer(of, to):
    own, less = (get_codec(name, platform="cpu", dtype="float32") for name in (of, to))
    x = (
        np.random.default_rng(0).normal(size=(3 * 5, 4, 8, 64)).astype(np.float32)
    )  # 3 layers of 5 pages
    low, store = (
        empty_store(
            num_layers=3,
            layout=HeadMajorLayout(num_kv_heads=2, head_dim=64, page_size=8, codec=codec),
            num_pages=num_pages,
        )
        for codec, num_pages in ((less, 2), (own, 5))
    )
    store = replace(store, pages=encode(own, x), low=low)
    (after,) = demote(PagedKV((store,)), jnp.int32(4), jnp.int32(1)).stores
    for layer in range(3):
        expected = encode(less, decode(own, np.asarray(store.pages)[layer * 5 + 4]))
        np.testing.assert_array_equal(after.low.pages[layer * 2 + 1], expected)
        assert not np.asarray(after.low.pages[layer * 2]).any()
    np.testing.assert_array_equal(after.pages, store.pages)
    lengths = measure_pages(PagedKV((store,)), jnp.asarray([4, 0]), measure=mean_lengths)
    expected = (
        np.linalg.norm(np.asarray(decode(own, store.pages)), axis=-1)
        .reshape(3, 5, 2, 2, 8)
        .mean(axis=(0, 3, 4))
    )
    np.testing.assert_allclose(lengths, expected[[4, 0]], rtol=1e-5)
