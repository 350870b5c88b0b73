"""The GPU kernels equal the float64 oracle where copies and barriers are modelled and memory of no
row is NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

from cases import contents
from jaxkv.kv.codecs import get_codec
from jaxkv.kv.state import PagedKV, PageTables, Store, copy_pages, empty_store
from jaxkv.ops.attention import Batch, Heads, Place, Terms
from jaxkv.ops.attention.mosaic_gpu import MosaicGpu
from jaxkv.ops.attention.xla import Xla
from jaxkv.tools.selftest_shapes import GPU_INTERPRETED_FROM
from kernels_pallas import gpu
from kernels_pallas.rows import Rows
from ragged import (
    LAYER,
    NUM_ROWS,
    WINDOWS,
    Case,
    Shape,
    assert_close,
    expected,
    first_page_behind,
    gpu_pages,
    random_case,
    sinks_of,
    stands_for,
)
from tiers import some

# Without optimising: what runs is the interpreter.
pytestmark = pytest.mark.usefixtures("quick_compile")

needs_interpreter = pytest.mark.skipif(
    jax.__version_info__ < GPU_INTERPRETED_FROM, reason="an interpreter that does not take them"
)
DECODE = [
    Shape(),
    Shape(num_heads=6, page_size=32, window=20),
    Shape(num_heads=3, kv_heads=1, sinks=True, softcap=2.0, page_size=128),
    Shape(num_heads=4, kv_heads=4, head_dim=64, window=40, sinks=True, page_size=64),
    Shape(num_heads=18, kv_heads=2, head_dim=64, window=150, page_size=64),
    Shape(num_heads=2, kv_heads=1, head_dim=256, softcap=5.0, window=1),
]
MIXED = [
    Shape(),
    Shape(num_heads=6, page_size=32, window=20),
    Shape(num_heads=3, kv_heads=1, sinks=True, softcap=2.0, page_size=128),
    Shape(num_heads=4, kv_heads=4, head_dim=64, window=40, sinks=True, page_size=64),
    Shape(num_heads=2, kv_heads=1, head_dim=256, softcap=5.0, window=70),
]
QUANTISED = [
    Shape(num_bits=8, page_size=64, window=100, sinks=True),
    Shape(num_bits=8, num_heads=3, kv_heads=1, head_dim=64, page_size=128, softcap=2.0),
    Shape(num_bits=4, page_size=64, window=100, sinks=True),
    Shape(num_bits=4, num_heads=3, kv_heads=1, head_dim=64, page_size=128, softcap=2.0),
]
QUANTISED_DECODE = [
    Shape(num_bits=8, num_heads=6, page_size=64, sinks=True),
    Shape(num_bits=8, num_heads=3, kv_heads=1, head_dim=64, page_size=128, window=150),
    Shape(num_bits=4, num_heads=6, page_size=64, sinks=True),
    Shape(num_bits=4, num_heads=3, kv_heads=1, head_dim=64, page_size=128, window=150),
]
LARGE_HEADS = [
    Shape(num_bits=num_bits, num_heads=2, kv_heads=1, head_dim=256, page_size=64, softcap=softcap)
    for num_bits, softcap in ((8, 3.0), (4, None))
]
QUANTISED += LARGE_HEADS
QUANTISED_DECODE += LARGE_HEADS


def schedule_of(
    case: Case, window: int | jax.Array | None, num_processors: int = 2, **rows: jax.Array
) -> gpu.Schedule:
    shape = case.shape
    return gpu.make_schedule(
        Rows(**rows, page_size=shape.page_size, window=window),
        jnp.int32(case.num_decode),
        jnp.int32(case.num_rows),
        num_tokens=len(case.row_T),
        num_heads=shape.num_heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        num_processors=num_processors,
        decode_only=shape.decode_only,
    )


def program(
    case: Case, windows: tuple[int, ...] = (), *, num_processors: int = 2
) -> Callable[[int | None], jax.Array]:
    """Makes a function that attends with the shape's window or, with `windows`, with the schedule
    of the one whose traced index it is given, out of stacked ones.
    """
    shape = case.shape

    @jax.jit
    def step(q_TNH, pages, group, **rows):
        if windows:
            schedules = [schedule_of(case, window, num_processors, **rows) for window in windows]
            stacked = jax.tree.map(lambda *x: jnp.stack(x), *schedules)
            schedule = jax.tree.map(lambda x: x[group], stacked)
        else:
            schedule = schedule_of(case, shape.window, num_processors, **rows)
        return gpu.ragged_paged_attention(
            q_TNH,
            pages,
            schedule,
            layer=LAYER,
            num_pages=len(case.held),
            scale=shape.head_dim**-0.5,
            softcap=shape.softcap,
            sinks_N=sinks_of(shape),
            interpret=InterpretGPUParams(detect_races=True),
        )

    known = {name: x for name, x in case.arrays.items() if name not in ("k_TKH", "v_TKH")}
    pages = gpu_pages(case)
    return lambda group: step(pages=pages, group=group, **known)


def assert_right(case: Case, out: jax.Array) -> None:
    real_T = case.row_T < NUM_ROWS
    want, _ = expected(stands_for(case))
    out = np.asarray(out, np.float64)
    assert_close(out[real_T], want[real_T], case.shape.dtype)
    assert not out[: case.num_decode][~real_T[: case.num_decode]].any()


def check(seed: int, shape: Shape, **options: int) -> None:
    case = random_case(seed, shape)
    assert_right(case, program(case, **options)(None))


@needs_interpreter
@pytest.mark.parametrize("shape", some(DECODE, DECODE[2], DECODE[4]), ids=str)
def test_decode_batches_equal_float64_with_copies_and_races_modelled(shape):
    check(DECODE.index(shape), replace(shape, decode_only=True))


@needs_interpreter
@pytest.mark.parametrize("shape", some(MIXED, *MIXED[3:]), ids=str)
def test_mixed_batches_equal_float64_with_copies_and_races_modelled(shape):
    check(MIXED.index(shape), shape)


@needs_interpreter
@pytest.mark.parametrize("shape", some(QUANTISED, QUANTISED[2]), ids=str)
def test_quantised_pages_equal_what_their_numbers_stand_for(shape):
    check(21, shape)


@needs_interpreter
@pytest.mark.parametrize("shape", some(QUANTISED_DECODE, *QUANTISED_DECODE[1:3]), ids=str)
def test_decode_of_quantised_pages_equals_what_their_numbers_stand_for(shape):
    check(22, replace(shape, decode_only=True))


@needs_interpreter
def test_a_traced_index_picks_one_of_stacked_schedules_of_two_windows():
    case = first_page_behind(random_case(5, Shape()))
    attend = program(case, WINDOWS)
    for group, window in enumerate(WINDOWS):
        assert_right(replace(case, shape=replace(case.shape, window=window)), attend(group))


@pytest.mark.parametrize("decode_only", [False, True])
def test_schedules_differ_in_the_window_only_as_data(decode_only):
    case = random_case(0, Shape(decode_only=decode_only))
    names = ("table_BW", "first_BW", "len_B", "start_B", "count_B")
    rows = {name: jnp.asarray(case.arrays[name]) for name in names}
    made = [jax.eval_shape(partial(schedule_of, case, window, **rows)) for window in WINDOWS]
    traced = jax.eval_shape(lambda window: schedule_of(case, window, **rows), jnp.int32(1))
    assert made == [traced, traced]


@needs_interpreter
@pytest.mark.parametrize("codec", ["bfloat16", "int8", "int4"])
def test_the_backend_writes_and_attends_as_xla_does(codec):
    case = random_case(
        3, Shape(head_dim=64, window=40, page_size=16 if codec == "bfloat16" else 64)
    )
    arrays = {name: jnp.asarray(x) for name, x in case.arrays.items()}
    pages = jnp.nan_to_num(
        jnp.asarray(case.pages)
    )  # XLA's own writes need no NaN to tell them from others
    len_B = jnp.where(arrays["count_B"] > 0, arrays["len_B"], 0)
    table_BW, first_BW = arrays["table_BW"], arrays["first_BW"]
    before = PageTables(table_BW, first_BW, len_B - arrays["count_B"])
    after = PageTables(table_BW, first_BW, len_B)
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
        layout = backend.page_layout(heads, case.shape.page_size, get_codec(codec, platform="gpu"))
        arrays_of_pages = jax.jit(layout.encode)(pages[:, None])
        store = Store(arrays_of_pages[0], layout, num_layers=2).with_arrays(*arrays_of_pages)
        assert [(x.shape[1:], x.dtype) for x in store.pools] == [
            (x.shape, x.dtype) for x in layout.arrays
        ]

        @jax.jit
        def attend(store, batch, *inputs, backend=backend):
            prepared, at = backend.prepare(store, before, batch, heads), Place(store, LAYER, after)
            terms = Terms(0.125, np.dtype(jnp.float32))
            return backend.attend(*inputs, at, batch, prepared, terms)

        found.append(attend(store, batch, *(arrays[name] for name in ("q_TNH", "k_TKH", "v_TKH"))))
    (want, want_store, _), (out, out_store, _) = found
    np.testing.assert_array_equal(contents(out_store), contents(want_store))
    real_T = case.row_T < NUM_ROWS
    np.testing.assert_allclose(np.asarray(out)[real_T], np.asarray(want)[real_T], rtol=0, atol=0.02)


def test_a_fork_copies_int8_pages_with_their_scales():
    heads, codec = (
        Heads(num_heads=4, num_kv_heads=2, head_dim=64, window=None),
        get_codec("int8", platform="gpu"),
    )
    store = empty_store(
        num_layers=2,
        layout=MosaicGpu().page_layout(heads, 64, codec),
        num_pages=3,
    )
    pages, scales = (np.random.default_rng(0).integers(-9, 9, pool.shape) for pool in store.pools)
    store = replace(
        store, pages=jnp.asarray(pages, jnp.int8), scales=jnp.asarray(scales, jnp.bfloat16)
    )
    (after,) = copy_pages(
        PagedKV((store,)), jnp.array([1, 0]), jnp.array([2, 3])
    ).stores  # the last one is padding
    for new, old in zip(after.pools, (pages, scales), strict=True):
        np.testing.assert_array_equal(np.asarray(new, int), old[[0, 1, 1, 3, 4, 4]])
