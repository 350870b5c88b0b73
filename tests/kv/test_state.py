"""The KV state: values land in their slots, layers and rows never meet, padding lands nowhere, a
fork is isolated.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cases import contents, held
from handles import filled
from jaxkv.holding.allocator import KVHandle, PageAllocator
from jaxkv.kv.codecs import PlainCodec, decode, get_codec
from jaxkv.kv.layout import HeadMajorLayout
from jaxkv.kv.state import PagedKV, PageTables, Store, copy_pages, destinations, empty_store, write
from poison import nan_of, owned_slots, poison_kv

pytestmark = pytest.mark.usefixtures("quick_compile")

L, P, K, S, H = 2, 5, 2, 8, 4
CODECS = [
    get_codec("float32", platform="cpu"),
    get_codec("bfloat16", platform="cpu"),
    PlainCodec(dtype="bfloat16"),
]


def layout_of(codec):
    return HeadMajorLayout(num_kv_heads=K, head_dim=H, page_size=S, codec=codec)


PAST = P * S
"""The smallest destination that is padding: in a flat pool it is slot 0 of page 0 of the next
layer.
"""


def random_store(rng: np.random.Generator, codec: PlainCodec = CODECS[0]) -> Store:
    """A full pool: every slot of every page holds something."""
    store = empty_store(num_layers=L, layout=layout_of(codec), num_pages=P)
    pages = codec.encode(jnp.asarray(rng.normal(size=store.pages.shape), jnp.float32))
    return replace(store, pages=pages)


def tables_of(table_BW: np.ndarray, len_B: list[int]) -> PageTables:
    return PageTables(np.int32(table_BW), np.zeros_like(table_BW, np.int32), np.int32(len_B))


def by_layer(store: Store) -> np.ndarray:
    """Stored values [L, P, S, 2K, H] float64 (NaN stays NaN)."""
    return np.concatenate(contents(store), axis=3)


@pytest.mark.parametrize("codec", CODECS, ids=repr)
@pytest.mark.parametrize("layer", [0, 1])
def test_write_stores_the_rounded_values_of_one_layer_and_touches_nothing_else(codec, layer):
    rng = np.random.default_rng(0)
    store = random_store(rng, codec)
    dest_T = rng.permutation(P * S)[:13]
    k_TKH, v_TKH = rng.normal(size=(2, 13, K, H)).astype(np.float32)
    want = by_layer(store)
    rounded = (
        np.concatenate([k_TKH, v_TKH], axis=1).astype(jnp.dtype(codec.dtype)).astype(np.float64)
    )
    want[layer, dest_T // S, dest_T % S] = rounded
    np.testing.assert_array_equal(
        by_layer(write(store, k_TKH, v_TKH, dest_T=dest_T, layer=layer)), want
    )
    traced = jax.jit(write)(store, k_TKH, v_TKH, dest_T=dest_T, layer=jnp.int32(layer))
    np.testing.assert_array_equal(by_layer(traced), want)


@pytest.mark.parametrize("layer", [0, 1])
def test_write_drops_padding_in_a_full_pool_of_two_layers(layer):
    rng = np.random.default_rng(1)
    store = random_store(rng)
    dest_T = np.array([PAST, PAST + 1, PAST + S, 2 * PAST - 1, 2 * PAST, 3 * PAST])
    new = np.full((len(dest_T), K, H), 7.0, np.float32)
    np.testing.assert_array_equal(
        by_layer(write(store, new, new, dest_T=dest_T, layer=layer)), by_layer(store)
    )
    mixed = write(
        store,
        new,
        new,
        dest_T=np.where(np.arange(len(dest_T)) == 2, 3 * S + 5, dest_T),
        layer=layer,
    )
    changed = np.argwhere((by_layer(mixed) != by_layer(store)).all(axis=(3, 4)))
    assert changed.tolist() == [[layer, 3, 5]]


def test_write_refuses_other_heads_or_head_dims():
    store = random_store(np.random.default_rng(0))
    good = np.zeros((3, K, H), np.float32)
    for bad in (np.zeros((3, K + 1, H), np.float32), np.zeros((3, K, H - 1), np.float32)):
        for pair in ((good, bad), (bad, good)):
            with pytest.raises(
                ValueError, match=r"expected keys and values of \(K, H\) = \(2, 4\), got"
            ):
                write(store, *pair, dest_T=np.zeros(3, np.int32), layer=0)


def test_destinations_continue_each_row_and_padding_is_past_the_pool():
    store = random_store(np.random.default_rng(0))
    tables = tables_of([[3, 1], [4, 4], [0, 2]], [6, 0, S])
    row_T = np.int32([0, 0, 0, 1, 2, 3, 3])  # row 3 does not exist: padding
    offset_T = np.int32([0, 1, 2, 0, 0, 0, 9])
    dest_T = np.asarray(destinations(store, tables, row_T=row_T, offset_T=offset_T))
    assert dest_T[:5].tolist() == [3 * S + 6, 3 * S + 7, 1 * S + 0, 4 * S, 2 * S]
    assert (dest_T[5:] >= PAST).all()


def test_a_token_past_the_end_of_its_table_is_dropped_and_does_not_wrap_into_a_page():
    store, tables = random_store(np.random.default_rng(0)), tables_of([[4, 3]], [2 * S - 1])
    dest_T = destinations(store, tables, row_T=np.int32([0, 0, 0]), offset_T=np.int32([0, 1, 100]))
    assert int(dest_T[0]) == 3 * S + S - 1
    assert (np.asarray(dest_T[1:]) >= PAST).all()


def test_layers_rows_and_padding_written_through_random_tables_never_meet():
    rng = np.random.default_rng(2)
    store = poison_kv(PagedKV((random_store(rng),)), []).stores[0]
    table_BW = rng.permutation(P)[:4].reshape(2, 2)
    tables = tables_of(table_BW, [3, 0])
    row_T = np.int32([0] * 7 + [1] * 11 + [2] * 6)
    offset_T = np.int32([*range(7), *range(11), *range(6)])
    dest_T = destinations(store, tables, row_T=row_T, offset_T=offset_T)
    want = np.full((L, P, S, 2 * K, H), np.nan)
    for layer in range(L):
        k_TKH, v_TKH = rng.normal(size=(2, len(row_T), K, H)).astype(np.float32)
        store = write(store, k_TKH, v_TKH, dest_T=dest_T, layer=layer)
        for t in range(18):
            slot = [3, 0][row_T[t]] + offset_T[t]
            want[layer, table_BW[row_T[t], slot // S], slot % S] = np.concatenate(
                [k_TKH[t], v_TKH[t]]
            )
    np.testing.assert_array_equal(by_layer(store), want)


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_copy_pages_copies_whole_pages_of_every_layer_and_store_and_drops_padding(codec):
    rng = np.random.default_rng(3)
    kv = PagedKV((random_store(rng, codec), random_store(rng, codec)))
    scales = jnp.asarray(rng.integers(0, 99, (L * P, 1, 8)))
    kv = replace(kv, stores=(kv.stores[0], replace(kv.stores[1], scales=scales)))
    source_C, target_C = (
        np.int32([3, 0, 1, 4]),
        np.int32([1, 4, P, P + 3]),
    )  # page 1 and 4 are read before they change
    copied = copy_pages(kv, source_C, target_C)
    for pair in zip(kv.stores, copied.stores, strict=True):
        want, found = (by_layer(replace(store, scales=None)) for store in pair)
        want[:, [1, 4]] = want[:, [3, 0]]
        np.testing.assert_array_equal(found, want)
    want = np.array(scales).reshape(L, P, 8)
    want[:, [1, 4]] = want[:, [3, 0]]
    np.testing.assert_array_equal(np.asarray(copied.stores[1].scales).reshape(L, P, 8), want)


def test_a_write_into_either_side_of_a_fork_is_not_seen_by_the_other():
    rng = np.random.default_rng(4)
    allocator = PageAllocator(P, S)
    parent = filled(allocator, 13)
    child, copy = allocator.own_tail(allocator.fork(parent))
    assert copy is not None
    assert child.pages[0] == parent.pages[0]
    store = copy_pages(PagedKV((random_store(rng),)), *np.int32(copy)[:, None]).stores[0]

    before = held(store, parent, 13)
    np.testing.assert_array_equal(held(store, child, 13), before)
    for handle, other in ((parent, child), (child, parent)):
        new = rng.normal(size=(1, K, H)).astype(np.float32)
        others = held(store, other, 13)
        dest = np.int32([handle.pages[1] * S + 13 % S])
        for layer in range(L):
            store = write(store, new, new, dest_T=dest, layer=layer)
        np.testing.assert_array_equal(held(store, other, 13), others)
        np.testing.assert_array_equal(held(store, handle, 14)[:, :, :13], before)
        np.testing.assert_array_equal(
            held(store, handle, 14)[0, :, 13], np.broadcast_to(new, (L, K, H))
        )
    allocator.check([parent, child])


def test_a_page_is_as_large_as_the_pool_says():
    for codec in CODECS:
        store = random_store(np.random.default_rng(0), codec)
        page = layout_of(codec)
        assert page.nbytes == 2 * K * S * H * codec.storage_dtype.itemsize
        assert store.pages.nbytes == L * P * page.nbytes


def test_the_poison_fills_exactly_what_no_handle_owns():
    for codec in CODECS:
        kv = PagedKV((random_store(np.random.default_rng(5), codec),))
        handles = [
            KVHandle((3, 1), 11),
            KVHandle((3, 4), S),
            KVHandle((2,), 0),
        ]  # page 3 shared, page 4 only reserved
        owned_PS = owned_slots(handles, num_pages=P, page_size=S)
        assert owned_PS.sum() == S + 3
        after = by_layer(poison_kv(kv, handles).stores[0])
        np.testing.assert_array_equal(after[:, owned_PS], by_layer(kv.stores[0])[:, owned_PS])
        assert np.isnan(after[:, ~owned_PS]).all()
        assert np.isnan(
            np.asarray(decode(codec, jnp.asarray(nan_of(codec.storage_dtype)))).astype(np.float32)
        )
