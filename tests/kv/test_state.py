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
from jaxkv.holding.allocator import KVHandle, PageAllocator
from jaxkv.kv.codecs import PlainCodec, decode, get_codec
from jaxkv.kv.layout import HeadMajorLayout
from jaxkv.kv.state import GroupKV, PagedKV, copy_pages, destinations, empty_group, write
from poison import nan_of, owned_slots, poison_kv

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


def random_group(
    rng: np.random.Generator, codec: PlainCodec = CODECS[0], num_rows: int = 0, width: int = 1
) -> GroupKV:
    """A full pool: every slot of every page holds something."""
    group = empty_group(num_layers=L, layout=layout_of(codec), num_pages=P)
    pages = codec.encode(jnp.asarray(rng.normal(size=group.pages.shape), jnp.float32))
    table_BW = rng.integers(0, P, (num_rows, width)).astype(np.int32)
    return replace(
        group, pages=pages, table_BW=table_BW, first_BW=table_BW * 0, len_B=table_BW[:, 0] * 0
    )


def by_layer(group: GroupKV) -> np.ndarray:
    """Stored values [L, P, S, 2K, H] float64 (NaN stays NaN)."""
    return np.concatenate(contents(group), axis=3)


@pytest.mark.parametrize("codec", CODECS, ids=repr)
@pytest.mark.parametrize("layer", [0, 1])
def test_write_stores_the_rounded_values_of_one_layer_and_touches_nothing_else(codec, layer):
    rng = np.random.default_rng(0)
    group = random_group(rng, codec)
    dest_T = rng.permutation(P * S)[:13]
    k_TKH, v_TKH = rng.normal(size=(2, 13, K, H)).astype(np.float32)
    want = by_layer(group)
    rounded = (
        np.concatenate([k_TKH, v_TKH], axis=1).astype(jnp.dtype(codec.dtype)).astype(np.float64)
    )
    want[layer, dest_T // S, dest_T % S] = rounded
    np.testing.assert_array_equal(
        by_layer(write(group, k_TKH, v_TKH, dest_T=dest_T, layer=layer)), want
    )
    traced = jax.jit(write)(group, k_TKH, v_TKH, dest_T=dest_T, layer=jnp.int32(layer))
    np.testing.assert_array_equal(by_layer(traced), want)


@pytest.mark.parametrize("layer", [0, 1])
def test_write_drops_padding_in_a_full_pool_of_two_layers(layer):
    rng = np.random.default_rng(1)
    group = random_group(rng)
    dest_T = np.array([PAST, PAST + 1, PAST + S, 2 * PAST - 1, 2 * PAST, 3 * PAST])
    new = np.full((len(dest_T), K, H), 7.0, np.float32)
    np.testing.assert_array_equal(
        by_layer(write(group, new, new, dest_T=dest_T, layer=layer)), by_layer(group)
    )
    mixed = write(
        group,
        new,
        new,
        dest_T=np.where(np.arange(len(dest_T)) == 2, 3 * S + 5, dest_T),
        layer=layer,
    )
    changed = np.argwhere((by_layer(mixed) != by_layer(group)).all(axis=(3, 4)))
    assert changed.tolist() == [[layer, 3, 5]]


def test_write_refuses_other_heads_or_head_dims():
    group = random_group(np.random.default_rng(0))
    good = np.zeros((3, K, H), np.float32)
    for bad in (np.zeros((3, K + 1, H), np.float32), np.zeros((3, K, H - 1), np.float32)):
        for pair in ((good, bad), (bad, good)):
            with pytest.raises(
                ValueError, match=r"expected keys and values of \(K, H\) = \(2, 4\), got"
            ):
                write(group, *pair, dest_T=np.zeros(3, np.int32), layer=0)


def test_destinations_continue_each_row_and_padding_is_past_the_pool():
    group = random_group(np.random.default_rng(0), num_rows=3, width=2)
    group = replace(group, table_BW=np.int32([[3, 1], [4, 4], [0, 2]]), len_B=np.int32([6, 0, S]))
    row_T = np.int32([0, 0, 0, 1, 2, 3, 3])  # row 3 does not exist: padding
    offset_T = np.int32([0, 1, 2, 0, 0, 0, 9])
    dest_T = np.asarray(destinations(group, row_T=row_T, offset_T=offset_T))
    assert dest_T[:5].tolist() == [3 * S + 6, 3 * S + 7, 1 * S + 0, 4 * S, 2 * S]
    assert (dest_T[5:] >= PAST).all()


def test_a_token_past_the_end_of_its_table_is_dropped_and_does_not_wrap_into_a_page():
    group = random_group(np.random.default_rng(0), num_rows=1, width=2).replace(
        len_B=np.int32([2 * S - 1])
    )
    dest_T = destinations(group, row_T=np.int32([0, 0, 0]), offset_T=np.int32([0, 1, 100]))
    assert int(dest_T[0]) == int(group.table_BW[0, 1]) * S + S - 1
    assert (np.asarray(dest_T[1:]) >= PAST).all()


def test_layers_rows_and_padding_written_through_random_tables_never_meet():
    rng = np.random.default_rng(2)
    group = poison_kv(PagedKV((random_group(rng),)), []).groups[0]
    table_BW = rng.permutation(P)[:4].reshape(2, 2).astype(np.int32)
    group = replace(group, table_BW=table_BW, len_B=np.int32([3, 0]))
    row_T = np.int32([0] * 7 + [1] * 11 + [2] * 6)
    offset_T = np.int32([*range(7), *range(11), *range(6)])
    dest_T = destinations(group, row_T=row_T, offset_T=offset_T)
    want = np.full((L, P, S, 2 * K, H), np.nan)
    for layer in range(L):
        k_TKH, v_TKH = rng.normal(size=(2, len(row_T), K, H)).astype(np.float32)
        group = write(group, k_TKH, v_TKH, dest_T=dest_T, layer=layer)
        for t in range(18):
            slot = [3, 0][row_T[t]] + offset_T[t]
            want[layer, table_BW[row_T[t], slot // S], slot % S] = np.concatenate(
                [k_TKH[t], v_TKH[t]]
            )
    np.testing.assert_array_equal(by_layer(group), want)


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_copy_pages_copies_whole_pages_of_every_layer_and_group_and_drops_padding(codec):
    rng = np.random.default_rng(3)
    kv = PagedKV((random_group(rng, codec), random_group(rng, codec)))
    scales = jnp.asarray(rng.integers(0, 99, (L * P, 1, 8)))
    kv = replace(kv, groups=(kv.groups[0], replace(kv.groups[1], scales=scales)))
    source_C, target_C = (
        np.int32([3, 0, 1, 4]),
        np.int32([1, 4, P, P + 3]),
    )  # page 1 and 4 are read before they change
    copied = copy_pages(kv, source_C, target_C)
    for groups in zip(kv.groups, copied.groups, strict=True):
        want, found = (by_layer(replace(group, scales=None)) for group in groups)
        want[:, [1, 4]] = want[:, [3, 0]]
        np.testing.assert_array_equal(found, want)
    want = np.array(scales).reshape(L, P, 8)
    want[:, [1, 4]] = want[:, [3, 0]]
    np.testing.assert_array_equal(np.asarray(copied.groups[1].scales).reshape(L, P, 8), want)


def test_a_write_into_either_side_of_a_fork_is_not_seen_by_the_other():
    rng = np.random.default_rng(4)
    allocator = PageAllocator(P, S)
    parent = allocator.advance(allocator.reserve(KVHandle(), 13), 13)
    child, copy = allocator.own_tail(allocator.fork(parent))
    assert copy is not None
    assert child.pages[0] == parent.pages[0]
    group = copy_pages(PagedKV((random_group(rng),)), *np.int32(copy)[:, None]).groups[0]

    before = held(group, parent, 13)
    np.testing.assert_array_equal(held(group, child, 13), before)
    for handle, other in ((parent, child), (child, parent)):
        new = rng.normal(size=(1, K, H)).astype(np.float32)
        others = held(group, other, 13)
        dest = np.int32([handle.pages[1] * S + 13 % S])
        for layer in range(L):
            group = write(group, new, new, dest_T=dest, layer=layer)
        np.testing.assert_array_equal(held(group, other, 13), others)
        np.testing.assert_array_equal(held(group, handle, 14)[:, :, :13], before)
        np.testing.assert_array_equal(
            held(group, handle, 14)[0, :, 13], np.broadcast_to(new, (L, K, H))
        )
    allocator.check([parent, child])


def test_a_page_is_as_large_as_the_pool_says():
    for codec in CODECS:
        group = random_group(np.random.default_rng(0), codec)
        page = layout_of(codec)
        assert page.nbytes == 2 * K * S * H * codec.storage_dtype.itemsize
        assert group.pages.nbytes == L * P * page.nbytes


def test_the_poison_fills_exactly_what_no_handle_owns():
    for codec in CODECS:
        kv = PagedKV((random_group(np.random.default_rng(5), codec),))
        handles = [
            KVHandle((3, 1), 11),
            KVHandle((3, 4), S),
            KVHandle((2,), 0),
        ]  # page 3 shared, page 4 only reserved
        owned_PS = owned_slots(handles, num_pages=P, page_size=S)
        assert owned_PS.sum() == S + 3
        after = by_layer(poison_kv(kv, handles).groups[0])
        np.testing.assert_array_equal(after[:, owned_PS], by_layer(kv.groups[0])[:, owned_PS])
        assert np.isnan(after[:, ~owned_PS]).all()
        assert np.isnan(
            np.asarray(decode(codec, jnp.asarray(nan_of(codec.storage_dtype)))).astype(np.float32)
        )
