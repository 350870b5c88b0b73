"""Decode rows whose pages' tokens devices divide equal the float64 oracle by the TPU kernel, which
sees a part of each page, and chunks beside them by XLA.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.kv.codecs import get_codec
from jaxkv.kv.state import PageTables, empty_store
from jaxkv.ops.attention import Batch, Heads, Place, Terms, pallas_tpu
from jaxkv.ops.attention.pallas_tpu import PallasTpu
from kernels_pallas import tpu
from ragged import LAYER, NUM_LAYERS, NUM_ROWS, Case, Shape, assert_close, expected, random_case
from tiers import some

pytestmark = pytest.mark.usefixtures("quick_compile")

RANK = 72
"""Numbers of a latent row that are its value."""


def with_low_scores(case: Case) -> Case:
    """The case with scores near -200, whose exponentials float32 does not have."""
    arrays, pages = {name: np.copy(x) for name, x in case.arrays.items()}, np.copy(case.pages)
    arrays["q_TNH"][..., -1] = -200 * case.shape.head_dim**0.5
    for x in (arrays["k_TKH"], arrays["v_TKH"], pages):
        x[..., -1] = np.where(np.isnan(x[..., -1]), np.nan, 1)
    return replace(case, arrays=arrays, pages=pages)


def latent(case: Case) -> Case:
    """The case with keys as values."""
    arrays = case.arrays | {"v_TKH": case.arrays["k_TKH"]}
    return replace(case, arrays=arrays, pages=np.repeat(case.pages[:, :1], 2, axis=1))


ONE = {"kv_heads": 1, "num_heads": 6}
PARTS = [
    (RANK, Shape(**ONE, head_dim=160, page_size=64, decode_only=True)),
    (RANK, Shape(**ONE, head_dim=160, page_size=32, dtype="float32")),
    (None, Shape(**ONE, head_dim=128, page_size=64, decode_only=True)),
    (None, Shape(**ONE, head_dim=64, page_size=32, dtype="float32", softcap=2.0)),
    (None, Shape(**ONE, head_dim=256, page_size=32, dtype="float32", softcap=2.0)),
]


def attended(case: Case, rank: int | None, num_devices: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns (out [T, N, H], pages [L*P, V, S, H]) in float64, of all devices."""
    shape, size = case.shape, case.shape.page_size
    tiles = tpu.Tiles(decode_pages=2, decode_heads=1, prefill_pages=1, prefill_queries=16)
    backend = PallasTpu(interpret=True, tiles=tiles, tokens_over="devices")
    given = {name: jnp.asarray(x) for name, x in case.arrays.items()}
    heads = Heads(
        num_heads=shape.num_heads // num_devices,
        num_kv_heads=1,
        head_dim=shape.head_dim,
        window=None,
        latent_dim=rank,
    )
    layout = backend.page_layout(heads, size, get_codec(shape.dtype, platform="tpu"))
    empty = empty_store(num_layers=NUM_LAYERS, layout=layout, num_pages=len(case.held))
    after = PageTables(given["table_BW"], given["first_BW"], given["len_B"])
    batch = Batch(
        token_T=jnp.zeros(len(case.row_T), jnp.int32),
        position_T=jnp.asarray(case.position_T, jnp.int32),
        row_T=jnp.asarray(case.row_T, jnp.int32),
        start_B=given["start_B"],
        count_B=given["count_B"],
        num_decode=jnp.int32(case.num_decode),
        num_rows=jnp.int32(case.num_rows),
        decode_only=shape.decode_only,
    )
    terms = Terms(shape.head_dim**-0.5, np.dtype(np.float32), shape.softcap or 0.0)

    @partial(jax.jit, compiler_options={"xla_backend_optimization_level": "0"})
    @partial(jax.vmap, in_axes=(1, 2), out_axes=(1, 2), axis_name="devices")
    def step(q_TNH: jax.Array, pages: jax.Array) -> tuple[jax.Array, jax.Array]:
        store = replace(empty, pages=pages)
        before = replace(after, len_B=after.len_B - batch.count_B)
        found = backend.attend(
            q_TNH,
            given["k_TKH"],
            given["v_TKH"] if rank is None else None,
            Place(store, LAYER, after),
            batch,
            backend.prepare(store, before, batch, heads),
            terms,
        )
        assert found.store.layout == layout
        return found.out_TNH, found.store.pages

    vectors = layout.num_vectors
    (pages,) = layout.encode(jnp.asarray(case.pages[:, None, :vectors]))
    parts = (
        jnp.stack(jnp.split(x, num_devices, i), i) for i, x in ((1, given["q_TNH"]), (2, pages))
    )
    out_TDNH, pages = step(*parts)
    pages = pages.reshape(*pages.shape[:2], size, -1)
    found = layout.decode([pages])[:, 0]
    out_TNH = np.asarray(out_TDNH, np.float64).reshape(len(out_TDNH), shape.num_heads, -1)
    return out_TNH, np.asarray(found, np.float64)


@pytest.mark.parametrize(("rank", "shape"), some(PARTS, *PARTS[:4]), ids=str)
def test_devices_that_divide_pages_equal_float64(monkeypatch, rank, shape):
    """Rows go to the kernel three at a time."""
    case = random_case(2, shape)
    case = case if rank is None else latent(case)
    if shape.dtype == "bfloat16":
        case = with_low_scores(case)
    monkeypatch.setattr(pallas_tpu, "most_rows_of_parts", lambda **_: 3)
    out, pages = attended(case, rank, 2)
    want, want_pages = expected(case)
    want, real_T = want[..., : out.shape[2]], case.row_T < NUM_ROWS
    assert_close(out[real_T], want[real_T], shape.dtype)
    assert not out[np.flatnonzero(~real_T[: case.num_decode])].any()
    by_vector = (x[len(case.held) :, : pages.shape[1]] for x in (pages, want_pages))
    for one, other in zip(*(np.moveaxis(x, 1, 0) for x in by_vector), strict=True):
        np.testing.assert_array_equal(one[case.held], other[case.held])


def test_beside_chunks_decode_rows_are_the_kernels_on_one_device_too(monkeypatch):
    """Which is where the self-test tries it."""

    def nothing(self: PallasTpu, *given: Any, **named: Any) -> Any:
        softmax, store = decode_parts(self, *given, **named)
        return softmax._replace(acc=jnp.zeros_like(softmax.acc)), store

    decode_parts = PallasTpu._decode_parts
    monkeypatch.setattr(PallasTpu, "_decode_parts", nothing)
    case = random_case(2, PARTS[3][1])
    out, _ = attended(case, None, 1)
    assert not out[: case.num_decode].any()
    assert out[case.num_decode : np.sum(case.row_T < NUM_ROWS)].any()
