"""Every layout gives back what its codec makes of keys and values, and reads what its backend has
written.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cases import contents, decode, encode
from jaxkv.kv.codecs import get_codec
from jaxkv.kv.layout import (
    HeadMajorLayout,
    LaneLayout,
    LaneRowsLayout,
    PageLayout,
    ScalesApartLayout,
)
from jaxkv.kv.state import PageTables, Store, destinations, empty_store, write
from jaxkv.ops.attention import Batch, Heads, Place, Terms
from jaxkv.ops.attention.mosaic_gpu import MosaicGpu
from jaxkv.ops.attention.pallas_tpu import PallasTpu
from jaxkv.ops.attention.xla import Xla

pytestmark = pytest.mark.usefixtures("quick_compile")

L, P = 3, 6
BACKENDS = {
    "cpu": Xla(),
    "gpu": MosaicGpu(),
    "tpu": PallasTpu(interpret=True),
    "tpu-xla": Xla(on_lanes=True),
}
KINDS = {
    "cpu": HeadMajorLayout,
    "gpu": HeadMajorLayout,
    "tpu": LaneLayout,
    "tpu-xla": LaneRowsLayout,
}
CASES = [
    ("cpu", "int8", 3, 16, 8),
    ("gpu", "int4", 2, 64, 64),
    ("tpu", "int4", 1, 128, 64),
    ("tpu-xla", "bfloat16", 2, 80, 8),
]
CASES += [
    pytest.param(case, marks=pytest.mark.slow)
    for case in (
        ("tpu-xla", "turboquant4", 3, 64, 8),
        ("cpu", "turboquant2.5", 2, 64, 8),
        ("tpu", "bfloat16", 2, 64, 16),  # two heads side by side
        ("cpu", "float32", 2, 16, 8),
        ("gpu", "int8", 2, 64, 64),
        ("tpu", "float32", 1, 64, 16),  # key and value side by side
        ("tpu", "int8", 2, 64, 32),
        ("cpu", "bfloat16", 2, 16, 8),
        ("cpu", "int4", 2, 64, 8),
        ("gpu", "bfloat16", 2, 64, 16),
        ("cpu", "fp8_e4m3", 2, 16, 8),
        ("cpu", "fp8_e5m2", 2, 16, 8),
        ("cpu", "turboquant4", 2, 64, 8),
        ("gpu", "int8", 1, 128, 64),
        ("tpu", "bfloat16", 2, 128, 16),
        ("tpu", "int8", 1, 64, 32),
        ("tpu", "int4", 2, 64, 64),
    )
]
PER_HEAD = 2
"""Query heads of a KV head."""


@pytest.fixture(params=CASES, ids=lambda case: "-".join(map(str, case)))
def layout(request) -> PageLayout:
    platform, name, kv_heads, head_dim, size = request.param
    codec = get_codec(name, platform=platform.split("-")[0])
    made = BACKENDS[platform].page_layout(heads_of(kv_heads, head_dim), size, codec)
    kind = KINDS[platform]
    if platform == "gpu" and name in ("int8", "int4"):
        kind = ScalesApartLayout
    assert type(made) is kind
    return made


def heads_of(kv_heads: int, head_dim: int) -> Heads:
    return Heads(
        num_heads=PER_HEAD * kv_heads, num_kv_heads=kv_heads, head_dim=head_dim, window=None
    )


def drawn(*shape: int) -> jax.Array:
    """Vectors of unlike lengths: each has a scale of its own."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=shape) * np.exp(rng.normal(size=shape[:-1]))[..., None]
    return jnp.asarray(x, jnp.float32)


def stands_for(layout: PageLayout, x: jax.Array) -> np.ndarray:
    """What the codec gives back of vectors."""
    return np.asarray(decode(layout.codec, encode(layout.codec, x)))


def assert_equal(got: np.ndarray, want: np.ndarray) -> None:
    """But for the order in which compiled code multiplies and adds."""
    apart = np.abs(got - want) / np.maximum(np.abs(want).max(axis=-1, keepdims=True), 1e-6)
    assert np.max(apart) < 1e-6


def test_unpacking_gives_what_the_codec_decodes_and_slots_past_the_end_are_zero(layout):
    """Also of heads that two devices divide, each of which packs its own."""
    num_tokens, heads = 2 * layout.page_size + 3, layout.num_kv_heads
    x = drawn(2, L, num_tokens, 2 * heads, layout.head_dim)
    pack, unpack = jax.jit(layout.pack), jax.jit(layout.unpack)
    parts = [pack(*x[..., :heads, :]), pack(*x[..., heads:, :])]
    for part in parts:
        assert [(y.shape, y.dtype) for y in part] == [
            ((L, 3, *page.shape), page.dtype) for page in layout.arrays
        ]
        assert sum(y.nbytes for y in part) == 3 * L * layout.nbytes
    both = [jnp.concatenate(arrays, axis=2) for arrays in zip(*parts, strict=True)]
    for got, want in zip(pack(*x), both, strict=True):
        np.testing.assert_array_equal(got, want)
    found, want = np.stack(unpack(both)), stands_for(layout, x)
    assert found.dtype == np.float32
    assert_equal(found[:, :, :num_tokens], want)
    np.testing.assert_allclose(found[:, :, num_tokens:], 0, rtol=0, atol=1e-20)
    assert_equal(np.stack(unpack(parts[1])), found[..., heads:, :])


def written(layout: PageLayout, at: Place, k: jax.Array, v: jax.Array) -> tuple[Store, jax.Array]:
    """The store after its backend has stored a decoding row's token and a chunk of another row,
    and which tokens are in which slots of the pool.
    """
    num_tokens, size = len(k), layout.page_size
    batch = Batch(
        token_T=jnp.zeros(num_tokens, jnp.int32),
        position_T=jnp.asarray([size + 2, *range(num_tokens - 1)], jnp.int32),
        row_T=jnp.asarray([0] + [1] * (num_tokens - 1), jnp.int32),
        start_B=jnp.asarray([0, 1], jnp.int32),
        count_B=jnp.asarray([1, num_tokens - 1], jnp.int32),
        num_decode=jnp.int32(1),
        num_rows=jnp.int32(2),
    )
    offset_T = jnp.asarray([0, *range(num_tokens - 1)])
    dest_T = destinations(at.store, at.tables, row_T=batch.row_T, offset_T=offset_T)
    if isinstance(layout, HeadMajorLayout):
        return jax.jit(write)(at.store, k, v, dest_T=dest_T, layer=at.layer), dest_T
    return step_on_tpu(at, k, v, batch), dest_T


@partial(jax.jit, compiler_options={"xla_backend_optimization_level": "0"})
def step_on_tpu(at: Place, k: jax.Array, v: jax.Array, batch: Batch) -> Store:
    backend, tables = BACKENDS["tpu"], at.tables
    prepared = backend.prepare(at.store, tables, batch, heads_of(*k.shape[1:]))
    q = jnp.zeros((len(k), PER_HEAD * k.shape[1], k.shape[2]))
    at = at._replace(tables=replace(tables, len_B=tables.len_B + batch.count_B))
    terms = Terms(1.0, np.dtype(np.float32))
    return backend.attend(q, k, v, at, batch, prepared, terms).store


def test_what_a_backend_writes_is_read_back_from_the_slots_of_its_tokens(layout, small_tiles):
    """And whatever else somebody may hold is what it was before."""
    size, num_tokens = layout.page_size, 1 + layout.page_size + 5
    before = drawn(2, L, P * size, layout.num_kv_heads, layout.head_dim)
    store = empty_store(num_layers=L, layout=layout, num_pages=P)
    assert (store.page_size, store.num_kv_heads) == (size, layout.num_kv_heads)
    full = (x.reshape(L * P, *x.shape[2:]) for x in jax.jit(layout.pack)(*before))
    store = store.with_arrays(*full)
    tables = PageTables(
        table_BW=jnp.asarray([[4, 1], [2, 5]], jnp.int32),
        first_BW=jnp.asarray([[0, size]] * 2, jnp.int32),
        len_B=jnp.asarray([size + 2, 0], jnp.int32),
    )
    k, v = 3 * drawn(2, num_tokens, layout.num_kv_heads, layout.head_dim)
    after, dest_T = written(layout, Place(store, 1, tables), k, v)
    want = contents(store).reshape(before.shape).copy()
    want[:, 1, dest_T] = stands_for(layout, jnp.stack([k, v]))
    found = contents(after).reshape(want.shape)
    if isinstance(layout, LaneLayout):  # what is written back with a row's last token
        for begin, end in ((size + 3, 2 * size), (5 * size + 5, 6 * size)):
            found[:, 1, begin:end] = want[:, 1, begin:end]
    assert_equal(found, want)
    is_old = np.ones(P * size, bool)
    is_old[dest_T] = False
    np.testing.assert_array_equal(found[:, :, is_old], want[:, :, is_old])


@pytest.mark.parametrize("name", ["float32", pytest.param("int4", marks=pytest.mark.slow)])
def test_pages_hold_a_row_once_whose_first_numbers_are_the_value(name):
    """Packing, unpacking and writing token by token agree."""
    codec, num_tokens, size = get_codec(name, platform="cpu"), 19, 8
    heads = Heads(num_heads=4, num_kv_heads=1, head_dim=24, window=None, latent_dim=16)
    layout = Xla().page_layout(heads, size, codec)
    assert layout.nbytes == size * codec.width(24) * codec.storage_dtype.itemsize
    k = drawn(L, num_tokens, 1, 24)
    (packed,) = layout.pack(k, None)
    keys, values = layout.unpack([packed])
    assert_equal(np.asarray(keys)[:, :num_tokens], stands_for(layout, k))
    np.testing.assert_array_equal(values, keys[..., :16])
    store = empty_store(num_layers=L, layout=layout, num_pages=3)
    for layer in range(L):
        store = jax.jit(write)(store, k[layer], None, dest_T=jnp.arange(num_tokens), layer=layer)
    stored = store.pages.reshape(packed.shape)
    np.testing.assert_array_equal(stored[:, :2], packed[:, :2])
    for given in ((k[0], k[0]), (k[0, :, :, :16], None)):
        with pytest.raises(ValueError, match="expected keys alone"):
            write(store, *given, dest_T=jnp.arange(num_tokens), layer=0)


@pytest.mark.parametrize("lanes", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_pages_hold_one_more_key_for_all_heads(lanes):
    """Which every device has where heads are divided."""
    codec, num_tokens, size = get_codec("float32", platform="cpu"), 19, 8
    layout, whole = (
        Xla(on_lanes=lanes).page_layout(heads, size, codec)
        for heads in (replace(heads_of(n, 24), has_index_key=True) for n in (1, 2))
    )
    k, v = drawn(L, num_tokens, 3, 24), drawn(L, num_tokens, 2, 24)
    for own, num_devices in ((whole, 1), (layout, 2)):
        (packed,) = own.pack(k, v)
        assert packed.shape[2] == num_devices * own.arrays[0].shape[0]
        for got, want in zip(own.unpack([packed]), (k, v), strict=True):
            np.testing.assert_array_equal(got[:, :num_tokens], want)
    store = empty_store(num_layers=L, layout=whole, num_pages=3)
    for i in range(L):
        store = jax.jit(write)(store, k[i], v[i], dest_T=jnp.arange(num_tokens), layer=i)
    (packed,) = whole.pack(k, v)
    np.testing.assert_array_equal(store.pages.reshape(packed.shape)[:, :2], packed[:, :2])
    with pytest.raises(ValueError, match="and one more key, got"):
        write(store, k[0, :, :2], v[0], dest_T=jnp.arange(num_tokens), layer=0)
    with pytest.raises(ValueError, match="and one more key, got"):
        whole.pack(k[:, :, :2], v)


def test_keys_and_values_of_other_shapes_are_refused_and_layouts_are_values():
    codec = get_codec("int8", platform="gpu")
    layout, same = (MosaicGpu().page_layout(heads_of(2, 64), 64, codec) for _ in range(2))
    good = jnp.zeros((L, 4, 2, 64))
    for pair in ((good, good[:, :3]), (good[:, :, :1],) * 2, (good[..., :32],) * 2):
        with pytest.raises(ValueError, match="expected keys and values"):
            layout.pack(*pair)
    assert (layout, hash(layout)) == (same, hash(same))
    assert layout not in (
        replace(layout, page_size=128),
        Xla().page_layout(heads_of(2, 64), 64, codec),
    )
