"""The GPU kernels equal the float64 oracle where copies and barriers are modelled and memory of no row is NaN."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

from jaxkv.kv.codecs import PlainCodec
from jaxkv.kv.state import GroupKV
from jaxkv.ops.attention import Batch, Heads
from jaxkv.ops.attention.mosaic_gpu import MosaicGpu
from jaxkv.ops.attention.xla import Xla
from kernels_pallas import gpu, reference
from kernels_pallas.rows import Rows
from ragged import LAYER, NUM_ROWS, Case, Shape, assert_close, assert_statistics_close, expected, random_case, sinks_of

needs_interpreter = pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="the interpreter of jax 0.10 knows no transposed parts of references"
)
DECODE = [
    Shape(),
    Shape(num_heads=6, page_size=32, window=20),
    Shape(num_heads=3, kv_heads=1, sinks=True, softcap=2.0, statistics=True, page_size=128),
    Shape(num_heads=4, kv_heads=4, head_dim=64, window=40, sinks=True, page_size=64),
    Shape(num_heads=18, kv_heads=2, head_dim=64, statistics=True, window=150, page_size=64),
    Shape(num_heads=2, kv_heads=1, head_dim=256, softcap=5.0, window=1),
]
MASSES = [
    Shape(sinks=True),
    Shape(num_heads=3, kv_heads=1, page_size=64, window=100),
    pytest.param(Shape(num_heads=10, kv_heads=1, head_dim=64, page_size=128, softcap=3.0), marks=pytest.mark.slow),
    pytest.param(Shape(num_heads=2, kv_heads=2, page_size=32, window=40, sinks=True), marks=pytest.mark.slow),
]


MIXED = [
    Shape(),
    Shape(num_heads=6, page_size=32, window=20),
    Shape(num_heads=3, kv_heads=1, sinks=True, softcap=2.0, statistics=True, page_size=128),
    Shape(num_heads=4, kv_heads=4, head_dim=64, window=40, sinks=True, statistics=True, page_size=64),
    Shape(num_heads=2, kv_heads=1, head_dim=256, softcap=5.0, window=70),
]


def run(case: Case, *, num_processors: int = 2) -> tuple:
    shape, arrays = case.shape, case.arrays

    @jax.jit
    def step(q_TNH, k_TKH, v_TKH, pages, table_BW, first_BW, len_B, start_B, count_B):
        rows = Rows(table_BW, first_BW, len_B, start_B, count_B, shape.page_size, shape.window)
        schedule = gpu.make_schedule(
            rows,
            jnp.int32(case.num_decode),
            jnp.int32(case.num_rows),
            num_tokens=len(case.row_T),
            num_heads=shape.num_heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            num_processors=num_processors,
            decode_only=shape.decode_only,
        )
        return gpu.ragged_paged_attention(
            q_TNH,
            reference.write_pages(pages, k_TKH, v_TKH, case.dest_T, layer=LAYER, num_pages=len(case.held)),
            schedule,
            layer=LAYER,
            num_pages=len(case.held),
            scale=shape.head_dim**-0.5,
            softcap=shape.softcap,
            sinks_N=sinks_of(shape),
            statistics=shape.statistics,
            page_mass=shape.page_mass,
            interpret=InterpretGPUParams(detect_races=True),
        )

    return step(pages=jnp.asarray(case.pages), **arrays)


def check(seed: int, shape: Shape, **options: int) -> None:
    case = random_case(seed, shape)
    real_T = case.row_T < NUM_ROWS
    out, statistics = run(case, **options)
    want, want_statistics, _ = expected(case)
    out = np.asarray(out, np.float64)
    assert_close(out[real_T], want[real_T], shape.dtype)
    assert not out[: case.num_decode][~real_T[: case.num_decode]].any()
    if shape.statistics or shape.page_mass:
        assert_statistics_close(statistics[:3], want_statistics[:3], real_T, shape.dtype)
    if shape.page_mass:
        mass_TNW = np.asarray(statistics.mass_BNW)
        np.testing.assert_allclose(mass_TNW[real_T], want_statistics.mass_TNW[real_T], rtol=1e-4, atol=1e-5)
        assert not mass_TNW[~real_T].any()


@needs_interpreter
@pytest.mark.parametrize("shape", DECODE, ids=str)
def test_decode_batches_equal_float64_with_copies_and_races_modelled(shape):
    check(DECODE.index(shape), replace(shape, decode_only=True))


@needs_interpreter
@pytest.mark.parametrize("shape", MASSES, ids=str)
def test_masses_per_page_equal_float64_with_copies_and_races_modelled(shape):
    check(11, replace(shape, decode_only=True, page_mass=True))


def test_masses_of_a_step_with_chunks_are_refused():
    with pytest.raises(NotImplementedError, match="page_mass: expected a step of decode rows only"):
        run(random_case(0, Shape(page_mass=True)))


@needs_interpreter
@pytest.mark.parametrize("shape", MIXED, ids=str)
def test_mixed_batches_equal_float64_with_copies_and_races_modelled(shape):
    check(MIXED.index(shape), shape)


@needs_interpreter
def test_the_backend_writes_and_attends_as_xla_does():
    case = random_case(3, Shape(head_dim=64, window=40))
    arrays = {name: jnp.asarray(x) for name, x in case.arrays.items()}
    pages = jnp.nan_to_num(jnp.asarray(case.pages))  # XLA's own writes need no NaN to tell them from others
    len_B = jnp.where(arrays["count_B"] > 0, arrays["len_B"], 0)
    group = GroupKV(
        pages=pages,
        table_BW=arrays["table_BW"],
        first_BW=arrays["first_BW"],
        len_B=len_B - arrays["count_B"],
        codec=PlainCodec(dtype="bfloat16"),
        num_layers=2,
    )
    batch = Batch(
        token_T=jnp.zeros(len(case.row_T), jnp.int32),
        position_T=jnp.asarray(case.position_T, jnp.int32),
        row_T=jnp.asarray(case.row_T, jnp.int32),
        start_B=arrays["start_B"],
        count_B=arrays["count_B"],
        num_decode=jnp.int32(case.num_decode),
        num_rows=jnp.int32(case.num_rows),
    )
    heads = Heads(num_heads=4, num_kv_heads=2, head_dim=64, window=40)
    found = []
    for backend in (Xla(), MosaicGpu(interpret=InterpretGPUParams(), num_processors=2)):
        prepared = backend.prepare(group, batch, heads)
        stepped = replace(group, len_B=len_B)
        inputs = [arrays[name] for name in ("q_TNH", "k_TKH", "v_TKH")]
        options = {"layer": LAYER, "scale": 0.125, "out_dtype": np.dtype(jnp.float32)}
        found.append(backend.attend(*inputs, stepped, batch, prepared, **options))
    (want, want_group), (out, out_group) = found
    np.testing.assert_array_equal(out_group.pages, want_group.pages)
    real_T = case.row_T < NUM_ROWS
    np.testing.assert_allclose(np.asarray(out)[real_T], np.asarray(want)[real_T], rtol=0, atol=0.02)
