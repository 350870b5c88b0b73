"""The TPU kernels equal the float64 oracle where DMAs are modelled and all memory that no row holds
is NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas import tpu
from ragged import (
    LAYER,
    NUM_ROWS,
    WINDOWS,
    Case,
    Shape,
    assert_close,
    dequantise,
    expected,
    first_page_behind,
    first_page_shared,
    quantise,
    random_case,
    sinks_of,
    stands_for,
)
from tiers import some

pytestmark = pytest.mark.usefixtures("quick_compile")

pack, unpack = (jax.jit(function, static_argnums=0) for function in (tpu.pack, tpu.unpack))
"""In one program each, where they would be one per operation."""

TILE = 16
"""Slots that are written back together: what else is in them may change where nobody holds it."""


def layout_of(shape: Shape) -> tpu.Layout:
    return tpu.layout_of(kv_heads=shape.kv_heads, head_dim=shape.head_dim)


def tiles_of(shape: Shape) -> tpu.Tiles:
    heads = shape.heads or layout_of(shape).joined
    return tpu.Tiles(
        decode_pages=shape.block,
        decode_heads=heads,
        prefill_pages=shape.block,
        prefill_parts=shape.parts,
        prefill_queries=16,
    )


MIXED = [
    Shape(),
    Shape(num_heads=6, page_size=32, window=20, block=1),
    Shape(num_heads=3, kv_heads=1, sinks=True, softcap=2.0, dtype="float32", block=1, parts=2),
    Shape(num_heads=4, kv_heads=4, head_dim=64, window=40, sinks=True),
    Shape(num_heads=4, kv_heads=1, head_dim=64, window=33, block=3, dtype="float32"),
    Shape(num_heads=2, kv_heads=1, head_dim=256, softcap=5.0, dtype="float32", window=1),
    Shape(tables_in_hbm=True),
    Shape(tables_in_hbm=True, window=40, softcap=2.0, block=1, parts=2),
]
QUANTISED = [
    Shape(num_bits=8, page_size=32),
    Shape(num_bits=4, page_size=64, num_heads=6),
    Shape(num_bits=8, page_size=64, num_heads=8, kv_heads=4, head_dim=64, sinks=True, window=40),
    Shape(
        num_bits=4,
        page_size=64,
        num_heads=3,
        kv_heads=1,
        head_dim=64,
        softcap=2.0,
        block=1,
        parts=2,
    ),
    Shape(num_bits=8, page_size=128, kv_heads=1, head_dim=256, tables_in_hbm=True),
    Shape(num_bits=4, page_size=128, num_heads=4, kv_heads=2, head_dim=64, block=3),
    Shape(num_bits=8, page_size=64, decode_only=True, num_heads=4, kv_heads=4, heads=2),
    Shape(
        num_bits=4,
        page_size=64,
        decode_only=True,
        num_heads=8,
        kv_heads=4,
        head_dim=64,
        heads=1,
        block=3,
    ),
]
DECODE = [
    Shape(sinks=True),
    Shape(window=30, num_heads=8, kv_heads=1, dtype="float32", block=3),
    Shape(page_size=64, kv_heads=4, softcap=3.0, block=1),
    Shape(page_size=128, head_dim=64, window=150),
    Shape(page_size=32, head_dim=64, kv_heads=1, dtype="float32", sinks=True),
    Shape(tables_in_hbm=True, block=1),
    Shape(tables_in_hbm=True, window=30, block=3),
    Shape(num_heads=4, kv_heads=4, heads=2, block=4),
]


def schedule_of(case: Case, window: int | jax.Array | None, **rows: jax.Array) -> tpu.Schedule:
    shape = case.shape
    return tpu.make_schedule(
        **rows,
        num_tokens=len(case.row_T),
        page_size=shape.page_size,
        window=window,
        tiles=tiles_of(shape),
        decode_only=shape.decode_only,
        packed=shape.num_bits is not None,
        **({"smem_bytes": 0} if shape.tables_in_hbm else {}),
    )


def program(
    case: Case, interpret: object, windows: tuple[int, ...] = ()
) -> Callable[[int | None], tuple]:
    """Makes a function that attends with the shape's window or, with `windows`, with the schedule
    of the one whose traced index it is given, out of stacked ones.
    """
    shape, arrays = case.shape, case.arrays

    # Without optimising: what runs is the interpreter.
    @partial(jax.jit, compiler_options={"xla_backend_optimization_level": "0"})
    def step(q_TNH, k_TKH, v_TKH, pages, layer, group, **rows):
        if windows:
            schedules = [schedule_of(case, window, **rows) for window in windows]
            stacked = jax.tree.map(lambda *x: jnp.stack(x), *schedules)
            schedule = jax.tree.map(lambda x: x[group], stacked)
        else:
            schedule = schedule_of(case, shape.window, **rows)
        assert (schedule.records is not None) == shape.tables_in_hbm
        return tpu.ragged_paged_attention(
            q_TNH,
            k_TKH,
            v_TKH,
            pages,
            schedule,
            layer=layer,
            num_pages=len(case.held),
            scale=shape.head_dim**-0.5,
            softcap=shape.softcap,
            sinks_N=sinks_of(shape),
            interpret=interpret,
        )

    if shape.num_bits:
        names = ("k_TKH", "v_TKH")
        arrays = arrays | {name: quantise(case.arrays[name], shape.num_bits) for name in names}
        pages = packed_pages(case)
    else:
        pages = pack(layout_of(shape), case.pages)
    known = {"num_decode": case.num_decode, "num_rows": case.num_rows, "layer": LAYER}
    return lambda group: step(pages=pages, group=group, **known, **arrays)


def run(case: Case, interpret: object) -> tuple:
    return program(case, interpret)(None)


def packed_pages(case: Case) -> tpu.Packed:
    num_bits = case.shape.num_bits
    stored = quantise(case.pages, num_bits)
    return jax.jit(tpu.pack_pages, static_argnums=(0, 1))(
        layout_of(case.shape), tpu.Packing(num_bits), stored
    )


def numbers_of(case: Case, packed: tpu.Packed) -> tpu.Quantised:
    shape, packing = case.shape, tpu.Packing(case.shape.num_bits)

    @jax.jit
    def unpacked(words, scales):
        values = tpu.unpack(layout_of(shape), packing.unpack_values(words))
        return tpu.Quantised(
            values, *tpu.unpack_scales(packing, scales, shape.kv_heads, shape.page_size)
        )

    return unpacked(packed.words, packed.scales)


def assert_packed_right(case: Case, found: tuple) -> None:
    """Attention is that of the vectors that the numbers stand for, and no bit has changed that no
    token went into.
    """
    shape, real_T, num_bits = case.shape, case.row_T < NUM_ROWS, case.shape.num_bits
    want, want_pages = expected(stands_for(case))
    out, packed = found
    assert_close(np.asarray(out, np.float64)[real_T], want[real_T], "bfloat16")

    after, before = numbers_of(case, packed), numbers_of(case, packed_pages(case))
    of_slots = dequantise(after, num_bits).swapaxes(1, 2)[len(case.held) :]
    wanted = want_pages.swapaxes(1, 2)[len(case.held) :].astype(np.float32)
    np.testing.assert_array_equal(of_slots[case.held], wanted[case.held])
    kept = np.ones((2, *case.held.shape), bool)
    dest = case.dest_T[real_T]
    kept[LAYER, dest // shape.page_size, dest % shape.page_size] = False
    kept = kept.reshape(-1, shape.page_size)
    for new, old in zip(after, before, strict=True):
        if new is not None:
            np.testing.assert_array_equal(
                np.asarray(new).swapaxes(1, 2)[kept], np.asarray(old).swapaxes(1, 2)[kept]
            )


def assert_right(case: Case, found: tuple) -> None:
    shape, real_T = case.shape, case.row_T < NUM_ROWS
    want, want_pages = expected(case)
    out, pages = jax.tree.map(lambda x: np.asarray(x, np.float64), found)
    assert_close(out[real_T], want[real_T], shape.dtype)
    resting = np.flatnonzero(~real_T[: case.num_decode])
    assert not out[resting].any()

    # Pages: held slots have their value, and only tiles that a token went into may have changed
    # anywhere else.
    pages = np.asarray(unpack(layout_of(shape), pages.astype(np.float32)))
    by_slot, want_by_slot = (
        pages.swapaxes(1, 2)[len(case.held) :],
        want_pages.swapaxes(1, 2)[len(case.held) :],
    )
    assert np.isnan(pages[: len(case.held)]).all()
    np.testing.assert_array_equal(by_slot[case.held], want_by_slot[case.held])
    changed = ~np.isnan(by_slot).all(axis=(2, 3)) & ~case.held
    tiles = np.zeros((len(case.held), shape.page_size // TILE), bool)
    dest = case.dest_T[real_T]
    tiles[dest // shape.page_size, dest % shape.page_size // TILE] = True
    assert not (changed & ~np.repeat(tiles, TILE, axis=1)).any()


def check_modelling_dmas(case: Case, capfd: pytest.CaptureFixture) -> None:
    shape = case.shape
    found = run(case, pltpu.InterpretParams(detect_races=True))
    jax.block_until_ready(found)
    assert "RACE" not in capfd.readouterr().out.upper()  # jax 0.10 and 0.11 only print it
    (assert_packed_right if shape.num_bits else assert_right)(case, found)


@pytest.mark.parametrize("shape", some(MIXED, MIXED[7]), ids=str)
def test_mixed_batches_equal_float64_with_dmas_and_races_modelled(shape, capfd):
    check_modelling_dmas(random_case(MIXED.index(shape), shape), capfd)


# Always: decode rows beside chunks, quantised ones alone, and those of HELD alone.
@pytest.mark.parametrize("shape", some(DECODE), ids=str)
def test_decode_batches_equal_float64_with_dmas_and_races_modelled(shape, capfd):
    case = random_case(DECODE.index(shape), replace(shape, decode_only=True))
    check_modelling_dmas(case, capfd)


@pytest.mark.parametrize("shape", some(QUANTISED, QUANTISED[2]), ids=str)
def test_quantised_batches_equal_what_their_numbers_stand_for(shape, capfd):
    check_modelling_dmas(random_case(QUANTISED.index(shape), shape), capfd)


HELD = {  # rounds of three blocks of 64 tokens; the second row rests
    "full, part": ([64, 1, 64, 64, 65, 64, 33], True),
    "part, full": ([33, 1, 17, 16, 64, 64, 64], False),
}


@pytest.mark.parametrize("kind", some(HELD, "full, part"))
def test_blocks_that_hold_all_and_fewer_of_their_pages_one_of_them_shared(kind, capfd):
    held, tables_in_hbm = HELD[kind]
    shape = Shape(decode_only=True, block=4, tables_in_hbm=tables_in_hbm)
    check_modelling_dmas(first_page_shared(random_case(1, shape, held)), capfd)


@pytest.mark.slow
def test_rows_that_share_a_quantised_page(capfd):
    shape = Shape(num_bits=8, page_size=32)
    case = random_case(2, shape, [3 * shape.page_size + row for row in range(NUM_ROWS)])
    check_modelling_dmas(first_page_shared(case), capfd)


def random_shape(rng: np.random.Generator, **given: object) -> Shape:
    kv_heads = int(rng.choice([1, 2, 4]))
    decode_only = bool(rng.random() < 0.5)
    return Shape(
        kv_heads=kv_heads,
        num_heads=kv_heads * int(rng.choice([1, 2, 3, 4, 8])),
        head_dim=int(rng.choice([64, 128, 256])),
        window=rng.choice([None, 1, 17, 64, 200]),
        softcap=rng.choice([None, 2.0, 30.0]),
        sinks=bool(rng.random() < 0.5),
        block=int(rng.integers(1, 5)),
        decode_only=decode_only,
        tables_in_hbm=bool(rng.random() < 0.5),
        **given,
    )


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_random_options_equal_float64_with_dmas_and_races_modelled(seed, capfd):
    rng = np.random.default_rng(seed)
    given = {
        "page_size": int(rng.choice([16, 32, 64, 128])),
        "dtype": str(rng.choice(["bfloat16", "float32"])),
    }
    check_modelling_dmas(random_case(seed, random_shape(rng, **given)), capfd)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(24))
def test_random_options_with_quantised_pages_equal_what_their_numbers_stand_for(seed, capfd):
    rng, num_bits = np.random.default_rng(100 + seed), (8, 4)[seed % 2]
    page_size = int(rng.choice([32, 64, 128] if num_bits == 8 else [64, 128]))
    shape = random_shape(rng, num_bits=num_bits, page_size=page_size)
    check_modelling_dmas(random_case(seed, shape), capfd)


@pytest.mark.slow
def test_the_plain_interpreter_gives_the_same():
    shape = Shape(window=40, sinks=True)
    case = random_case(3, shape)
    assert_right(case, run(case, True))


@pytest.mark.slow
@pytest.mark.parametrize("tables_in_hbm", [False, True])
def test_a_traced_index_picks_one_of_stacked_schedules_of_two_windows(tables_in_hbm):
    case = first_page_behind(random_case(5, Shape(tables_in_hbm=tables_in_hbm)))
    attend = program(case, True, WINDOWS)
    for group, window in enumerate(WINDOWS):
        assert_right(replace(case, shape=replace(case.shape, window=window)), attend(group))


@pytest.mark.parametrize("decode_only", [False, True])
def test_schedules_differ_in_the_window_only_as_data(decode_only):
    case = random_case(0, Shape(decode_only=decode_only))
    names = ("table_BW", "first_BW", "len_B", "start_B", "count_B")
    rows = {name: case.arrays[name] for name in names}
    rows |= {"num_decode": np.int32(case.num_decode), "num_rows": np.int32(case.num_rows)}
    *made, without = (
        jax.eval_shape(partial(schedule_of, case, window, **rows)) for window in (*WINDOWS, None)
    )
    traced = jax.eval_shape(lambda window: schedule_of(case, window, **rows), jnp.int32(1))
    assert made == [traced, traced]
    assert jax.tree.structure(without) != jax.tree.structure(traced)


@pytest.mark.slow
@pytest.mark.parametrize("tables_in_hbm", [False, True])
def test_a_step_of_resting_rows_writes_nothing_and_gives_zeros(tables_in_hbm):
    case = random_case(0, Shape(decode_only=True, tables_in_hbm=tables_in_hbm))
    case.arrays["count_B"][:] = 0
    out, pages = run(case, pltpu.InterpretParams(detect_races=True))
    assert not np.asarray(out).any()
    np.testing.assert_array_equal(np.asarray(pages, np.float32), case.pages.astype(np.float32))


@pytest.mark.parametrize(("kv_heads", "head_dim"), [(2, 128), (4, 64), (1, 64), (3, 64), (1, 256)])
def test_packing_keeps_the_bytes_and_can_be_undone(kv_heads, head_dim):
    layout = tpu.layout_of(kv_heads=kv_heads, head_dim=head_dim)
    pages = jnp.arange(3 * 2 * kv_heads * 16 * head_dim, dtype=jnp.float32).reshape(
        3, 2 * kv_heads, 16, head_dim
    )
    packed = pack(layout, pages)
    assert packed.size == pages.size
    assert packed.shape[1:] == (layout.rows, 16, layout.width)
    assert packed.shape[-1] % 128 == 0
    np.testing.assert_array_equal(unpack(layout, packed), pages)


def test_what_the_kernels_do_not_take_is_refused_by_name():
    with pytest.raises(
        NotImplementedError, match="head_dim: expected 64 or a multiple of 128, got 80"
    ):
        tpu.layout_of(kv_heads=2, head_dim=80)
    for change, reason in [
        ({"page_size": 8}, "page_size: expected one of"),
        ({"dtype": "float16"}, "pages: expected bfloat16 or float32, got float16"),
    ]:
        with pytest.raises(NotImplementedError, match=reason):
            run(random_case(0, replace(Shape(), **change)), True)
