"""The TPU kernels over latent pages equal the float64 oracle where DMAs are modelled and all memory
that no row holds is NaN.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from jaxkv.kv.codecs import get_codec
from jaxkv.kv.state import PageTables, Store, empty_store
from jaxkv.ops.attention import Backend, Batch, Heads, LatentMaps, Place, Terms, pallas_tpu
from jaxkv.ops.attention.pallas_tpu import PallasTpu
from jaxkv.ops.attention.xla import Xla
from jaxkv.ops.matrices import HeadMatrices
from kernels_pallas import tpu
from ragged import LAYER, NUM_ROWS, Case, Shape, assert_close, expected, random_case
from tiers import some

pytestmark = pytest.mark.usefixtures("quick_compile")

RANK = 72
"""Numbers of a row that are its value: neither all of them nor whole lanes."""

LATENT = [
    Shape(kv_heads=1, num_heads=8, head_dim=256),
    Shape(kv_heads=1, num_heads=5, head_dim=128, page_size=32, block=3, decode_only=True),
    Shape(kv_heads=1, num_heads=16, head_dim=256, page_size=64, block=4, decode_only=True),
    Shape(kv_heads=1, num_heads=3, head_dim=384, page_size=128, block=6, dtype="float32"),
    Shape(kv_heads=1, num_heads=4, head_dim=256, tables_in_hbm=True, block=1),
    Shape(kv_heads=1, num_heads=4, head_dim=256, window=30, block=3),
    Shape(kv_heads=1, num_heads=8, head_dim=256, page_size=128, block=5, decode_only=True),
]


def latent_case(seed: int, shape: Shape) -> Case:
    """A case whose values are its keys."""
    case = random_case(seed, shape)
    arrays = case.arrays | {"v_TKH": case.arrays["k_TKH"]}
    return replace(case, arrays=arrays, pages=np.repeat(case.pages[:, :1], 2, axis=1))


def run(case: Case, interpret: object) -> tuple:
    shape, arrays = case.shape, dict(case.arrays)
    layout = tpu.latent_layout_of(width=shape.head_dim, rank=RANK)
    tiles = tpu.Tiles(
        decode_pages=shape.block, decode_heads=1, prefill_pages=shape.block, prefill_queries=16
    )

    @partial(jax.jit, compiler_options={"xla_backend_optimization_level": "0"})
    def step(q_TNX, row_TX, pages, layer, **rows):
        schedule = tpu.make_schedule(
            **rows,
            num_tokens=len(case.row_T),
            page_size=shape.page_size,
            window=shape.window,
            tiles=tiles,
            decode_only=shape.decode_only,
            **({"smem_bytes": 0} if shape.tables_in_hbm else {}),
        )
        return tpu.ragged_latent_attention(
            q_TNX,
            row_TX,
            tpu.pack(layout, pages),
            schedule,
            rank=RANK,
            layer=layer,
            num_pages=len(case.held),
            scale=shape.head_dim**-0.5,
            interpret=interpret,
        )

    del arrays["v_TKH"]
    q_TNX, row_TX = arrays.pop("q_TNH"), arrays.pop("k_TKH")[:, 0]
    known = {"num_decode": case.num_decode, "num_rows": case.num_rows, "layer": LAYER}
    out, pages = step(q_TNX, row_TX, jnp.asarray(case.pages[:, :1]), **known, **arrays)
    return out, jax.jit(partial(tpu.unpack, layout))(pages)


def assert_right(case: Case, found: tuple) -> None:
    real_T = case.row_T < NUM_ROWS
    want, want_pages = expected(case)
    out, pages = (np.asarray(x, np.float64) for x in found)
    assert out.shape[-1] == RANK
    assert_close(out[real_T], want[real_T][..., :RANK], case.shape.dtype)
    assert not out[np.flatnonzero(~real_T[: case.num_decode])].any()
    by_slot, wanted = (x[len(case.held) :, 0] for x in (pages, want_pages))
    np.testing.assert_array_equal(by_slot[case.held], wanted[case.held])


@pytest.mark.parametrize("shape", some(LATENT, LATENT[0]), ids=str)
def test_latent_batches_equal_float64_with_dmas_and_races_modelled(shape, capfd):
    case = latent_case(LATENT.index(shape), shape)
    found = run(case, pltpu.InterpretParams(detect_races=True))
    jax.block_until_ready(found)
    assert "RACE" not in capfd.readouterr().out.upper()  # jax 0.10 and 0.11 only print it
    assert_right(case, found)


def test_latent_pages_hold_each_number_once_and_packing_can_be_undone():
    layout = tpu.latent_layout_of(width=384, rank=256)
    pages = jnp.arange(3 * 16 * 384, dtype=jnp.float32).reshape(3, 1, 16, 384)
    packed = tpu.pack(layout, pages)
    assert packed.shape == (3, layout.rows, 16, 128)
    np.testing.assert_array_equal(tpu.unpack(layout, packed), pages)
    with pytest.raises(NotImplementedError, match="latent rows: expected a multiple of 128, got"):
        tpu.latent_layout_of(width=576, rank=512)


@pytest.mark.parametrize(
    ("name", "page_size", "apart"), some([("float32", 16, 1e-5), ("int8", 32, 0.03)])
)
def test_the_backend_gives_what_xla_gives_over_latent_pages(monkeypatch, name, page_size, apart):
    """A decode row and a chunk, of rows that the kernels pad; int8 rounds queries to bfloat16."""

    def choose(**_: object) -> tpu.Tiles:
        return tpu.Tiles(decode_pages=1, decode_heads=1, prefill_pages=1, prefill_queries=16)

    monkeypatch.setattr(pallas_tpu, "choose_tiles", choose)
    num_heads, head_dim, rank, num_pages, chunk = 4, 40, 24, 8, 21
    heads = Heads(
        num_heads=num_heads, num_kv_heads=1, head_dim=head_dim, window=None, latent_dim=rank
    )
    rng = np.random.default_rng(0)
    drawn = (
        jnp.asarray(rng.normal(size=shape), jnp.float32)
        for shape in (
            (1 + chunk, num_heads, 12 + head_dim - rank),
            (1 + chunk, 1, head_dim),
            (1, num_pages * page_size, 1, head_dim),
            (1, num_heads, rank, 12),
            (1, num_heads, 10, rank),
        )
    )
    q_TNH, k_TKH, before, *up = drawn
    maps = LatentMaps(*(HeadMatrices(x, jnp.int32(0)) for x in up))
    lengths = jnp.asarray([page_size + 2, 3], jnp.int32)
    tables = PageTables(
        table_BW=jnp.asarray([[4, 1], [2, 5]], jnp.int32),
        first_BW=jnp.asarray([[0, page_size]] * 2, jnp.int32),
        len_B=lengths,
    )
    count_B = jnp.asarray([1, chunk], jnp.int32)
    batch = Batch(
        token_T=jnp.zeros(1 + chunk, jnp.int32),
        position_T=jnp.asarray([page_size + 2, *range(3, 3 + chunk)], jnp.int32),
        row_T=jnp.asarray([0] + [1] * chunk, jnp.int32),
        start_B=jnp.asarray([0, 1], jnp.int32),
        count_B=count_B,
        num_decode=jnp.int32(1),
        num_rows=jnp.int32(2),
    )

    def attended(backend: Backend) -> np.ndarray:
        layout = backend.page_layout(heads, page_size, get_codec(name, platform="tpu"))

        def padded(x: jax.Array) -> jax.Array:
            return jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, layout.head_dim - head_dim),))

        packed = (x.reshape(-1, *x.shape[2:]) for x in layout.pack(padded(before), None))
        empty = empty_store(num_layers=1, layout=layout, num_pages=num_pages)

        @partial(jax.jit, compiler_options={"xla_backend_optimization_level": "0"})
        def step(store: Store) -> jax.Array:
            prepared = backend.prepare(store, tables, batch, heads)
            at = Place(store, 0, replace(tables, len_B=lengths + count_B))
            terms = Terms(head_dim**-0.5, np.dtype(np.float32), maps=maps)
            k = padded(k_TKH)
            return backend.attend(q_TNH, k, None, at, batch, prepared, terms).out_TNH

        return np.asarray(step(empty.with_arrays(*packed)))

    xla, kernels = attended(Xla()), attended(PallasTpu(interpret=True))
    assert kernels.shape == xla.shape == (1 + chunk, num_heads, 10)
    np.testing.assert_allclose(kernels, xla, rtol=0, atol=apart * xla.std())
