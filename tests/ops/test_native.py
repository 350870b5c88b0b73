"""Machine code of jaxkv on a CPU: bits of its matmuls, derivatives, refusals; attention beside a
reference in float64.
"""

import itertools
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import LLM, SamplingParams
from jaxkv.kv.codecs import PlainCodec, ScaledCodec, get_codec
from jaxkv.kv.layout import HeadMajorLayout
from jaxkv.kv.state import PageTables, Store, empty_store
from jaxkv.ops import native
from jaxkv.ops.attention import Batch, Place
from jaxkv.ops.attention import native as attention_native
from jaxkv.ops.attention.native import attend, handler_for
from jaxkv.ops.attention.sweep import Scores
from jaxkv.ops.experts import run_experts
from jaxkv.ops.layers import linear
from jaxkv.ops.matrices import Matrix, Packed, Vectors
from jaxkv.testing import engine_of
from jaxkv.weights.packing import in_pairs
from kernels_pallas.cpu import int4, matmul512
from kernels_pallas.cpu import matmul as matmul256
from ragged import (
    LAYER,
    NUM_LAYERS,
    NUM_ROWS,
    Case,
    Shape,
    assert_close,
    expected,
    first_page_behind,
    first_page_shared,
    random_case,
    sinks_of,
    stands_for,
    written,
)
from tiers import some
from tiny import SMALL, make_checkpoint, tiny_config

llvm = pytest.importorskip("llvmlite.binding")
features = llvm.get_host_cpu_features()
pytestmark = [
    # XLA only calls the machine code, whose bits it does not decide.
    pytest.mark.usefixtures("quick_compile"),
    pytest.mark.skipif(
        not all(features.get(name) for name in native.NEEDED), reason="the processor has no AVX2"
    ),
]

DTYPES = (jnp.bfloat16, jnp.float32)


@pytest.fixture(autouse=True)
def decide(monkeypatch):
    """Has the machine code used whatever the processor, and decides anew where a test asks to."""

    def decide(asked):
        native._decided.cache_clear()
        if asked is None:
            monkeypatch.delenv(native.VARIABLE, raising=False)
        else:
            monkeypatch.setenv(native.VARIABLE, asked)
        return native.unused_because()

    decide("native")
    yield decide
    native._decided.cache_clear()


def random(shape, dtype, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


@pytest.fixture(params=["AVX2", "AVX-512"])
def kernel(request, monkeypatch, decide):
    """Multiplies by each of the kernels that the processor can run."""
    is_wide = all(features.get(name) for name in native.WIDE)
    if request.param == "AVX2":
        monkeypatch.setattr(native, "WIDE", (*native.WIDE, "not to be had"))
    elif not is_wide:
        pytest.skip("the processor has no AVX-512 with bfloat16")
    decide("native")
    jax.clear_caches()  # what was traced with the other kernel
    assert request.param in native.described()
    return native._code().matmul


def in_order(x, w, kernel):
    """Adds up as the machine code says it does. What is added to a product is rounded with it once:
    float64 holds the product.
    """
    lanes, depth = (8, matmul256.DEPTH) if kernel is matmul256 else (16, matmul512.DEPTH["float32"])
    x, w = np.asarray(x, np.float64), np.asarray(w, np.float64)
    y = np.zeros((x.shape[0], w.shape[0]), np.float32)
    for start in range(0, x.shape[1], depth):
        sums = np.zeros((*y.shape, lanes), np.float32)
        for k in range(start, min(x.shape[1], start + depth), lanes):
            products = x[:, None, k : k + lanes] * w[None, :, k : k + lanes]
            sums = (products + sums).astype(np.float32)
        while sums.shape[2] > 1:
            halves = sums[..., : sums.shape[2] // 2], sums[..., sums.shape[2] // 2 :]
            sums = sum(halves) if lanes == 16 else sums[..., ::2] + sums[..., 1::2]
        y += sums[..., 0]
    return y


def check(y, x, w, kernel):
    """Compares with `in_order`; loosely where a processor decides how pairs are rounded."""
    if kernel is matmul256 or w.dtype == jnp.float32:
        np.testing.assert_array_equal(y, in_order(x, w, kernel))
        return
    exact = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T
    largest = np.abs(np.asarray(x, np.float64)) @ np.abs(np.asarray(w, np.float64)).T
    assert np.all(np.abs(y - exact) <= 2**-23 * (np.sqrt(x.shape[1]) + 4) * largest)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_tokens", "columns", "rows"),
    [(1, 16, 16), (2, 784, 80), (7, 512, 48), (9, 1040, 80), (130, 256, 128), (300, 48, 176)],
)
def test_adds_up_in_order(dtype, num_tokens, columns, rows, kernel):
    columns *= kernel.COLUMNS[jnp.dtype(dtype).name] // 16
    x, w = random((num_tokens, columns), dtype), random((3, rows, columns), dtype, seed=1)

    product = jax.jit(native.matmul)

    check(product(x, w, 1), x, w[1], kernel)
    check(product(x, w, 7), x, w[2], kernel)
    check(product(x, w, -1), x, w[0], kernel)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [544, 2080])
def test_neighbours_do_not_change_a_bit(columns, dtype, kernel):
    x, w = random((200, columns), dtype), random((2, 80, columns), dtype, seed=1)
    product = jax.jit(native.matmul)
    alone = [product(x[t : t + 1], w, 1) for t in range(9)]

    for num_tokens in (2, 3, 4, 5, 6, 7, 8, 9, 96, 97, 200):
        y = product(x[:num_tokens], w, 1)
        np.testing.assert_array_equal(y[:9], np.concatenate(alone)[:num_tokens])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("used", [0, 5, 100, 200])
def test_rows_of_zeros_behind_the_others_are_not_multiplied(dtype, used, kernel):
    x, w = random((used, 96), dtype), random((2, 80, 96), dtype, seed=1)
    zeros = jnp.zeros((200 - used, 96), dtype).at[::3].set(-0.0)
    padded = jnp.concatenate([x.at[:-1:2].set(0), zeros])  # and some among the others
    product = jax.jit(native.matmul)
    alone = product(padded[: max(used, 1)], w, 1)[:used]

    y = product(padded, w, 1)
    beside_nan = product(padded, w * np.nan, 1)

    np.testing.assert_array_equal(y, np.concatenate([alone, np.zeros((200 - used, 80))]))
    assert np.isnan(beside_nan[:used]).all()  # 0 * NaN is NaN, where it is multiplied
    assert not np.asarray(beside_nan[used:]).any()


def test_rounds_what_it_multiplies_to_the_dtype_of_the_weights(kernel):
    x, w = random((5, 64), jnp.float32), random((1, 32, 64), jnp.bfloat16, seed=1)

    y = jax.jit(native.matmul)(x, w, 0)

    check(y, x.astype(jnp.bfloat16), w[0], kernel)


@pytest.mark.parametrize(
    ("num_tokens", "columns", "rows"), [(1, 16, 16), (8, 1040, 80), (200, 48, 176)]
)
def test_products_of_int8_are_exact(num_tokens, columns, rows, kernel):
    columns *= kernel.COLUMNS["int8"] // 16
    rng = np.random.default_rng(0)
    x = rng.integers(-127, 128, (num_tokens, columns), np.int8)
    w = rng.integers(-127, 128, (2, rows, columns), np.int8)
    x[0], w[:, 0] = -127, 127
    x[num_tokens // 2 + 1 :] = 0

    y = jax.jit(native.matmul_int8)(x, w, 1)

    np.testing.assert_array_equal(y, x.astype(np.int64) @ w[1].astype(np.int64).T)


KINDS = ("pairs", "int4", "int8", "float8_e4m3fn")


def packed_of(kind, groups, rows, columns, dtype, *, zeros=False, table=False, factor=False):
    """Random quantised matrices [2, 3, G, F, C], that of layer 1 and expert 2, and its values in
    float64.
    """
    rng, shape = np.random.default_rng(0), (2, 3, groups, rows)
    if kind == "float8_e4m3fn":
        values = np.asarray(jnp.asarray(3 * rng.standard_normal((*shape, columns)), kind))
    else:
        least = -8 if kind in ("pairs", "int4") else -128
        values = rng.integers(least, -least, (*shape, columns)).astype(np.int8)
    scales = rng.uniform(0.5, 2, shape).astype(np.float32)
    points = rng.integers(-8, 8, shape).astype(np.int8) if zeros else None
    tables = rng.standard_normal((2, 3, 16)).astype(np.float32) if table else None
    factors = rng.uniform(0.5, 2, (2, 3)).astype(np.float32) if factor else None
    numbers = values[1, 2].astype(np.float64)
    if table:
        numbers = tables[1, 2][values[1, 2].view(np.uint8) & 15].astype(np.float64)
    if zeros:
        numbers -= points[1, 2][..., None]
    if groups > 1 or zeros:
        own = scales[1, 2] if table else np.asarray(jnp.asarray(scales[1, 2], dtype))
        numbers *= own.astype(np.float64)[..., None]
    leaf = in_pairs(values) if kind == "pairs" else jnp.asarray(values, kind)
    if kind == "pairs" and not table and (groups > 1 or zeros):
        scales = np.asarray(jnp.asarray(scales, dtype))  # as the loader has those of its own
    arrays = [
        None if x is None else jnp.asarray(x) for x in (leaf, scales, points, tables, factors)
    ]
    place = (jnp.int32(1), jnp.int32(2))
    w_FD = np.moveaxis(numbers, 0, 1).reshape(rows, -1)
    after = scales[1, 2, 0] if groups == 1 and not zeros else np.ones(rows, np.float32)
    return Packed(*arrays, place, np.dtype(dtype)), w_FD, after * (factors[1, 2] if factor else 1)


PACKED = [
    *[(1, 5, 80, 128, kind, {}) for kind in KINDS],
    *[(130, 33, 80, 96, kind, {}) for kind in KINDS],
    (4, 1, 48, 2080, "pairs", {}),
    (7, 1, 48, 2080, "int8", {}),
    (3, 2, 48, 1152, "pairs", {"zeros": True}),
    (130, 2, 48, 192, "pairs", {"zeros": True}),
    (1, 3, 48, 64, "int4", {"zeros": True}),
    (2, 3, 32, 32, "pairs", {"zeros": True}),
    (2, 3, 32, 32, "int8", {"zeros": True}),
    (2, 3, 32, 32, "pairs", {"table": True, "factor": True}),
    (2, 3, 32, 32, "float8_e4m3fn", {"zeros": True}),
    (2, 1, 32, 64, "pairs", {"table": True}),
]
OF_EACH_DTYPE = some(
    [(*case, dtype) for dtype in DTYPES for case in PACKED],
    *[(*case, jnp.bfloat16) for case in PACKED],
    *[(*case, jnp.float32) for case in PACKED[4:8]],  # each kind, in several groups
)


def part_of(packed, kernel):
    """Returns how many columns `kernels_pallas.cpu.int4` adds up at once; None if it is not its."""
    is_4 = packed.leaf.dtype in (jnp.uint8, jnp.int4) and packed.tables is None
    if kernel is not matmul256 or not is_4 or packed.dtype == jnp.float32:
        return None
    return int4.part_of(packed.leaf.shape[-1] * (2 if packed.leaf.dtype == jnp.uint8 else 1))


def order_of(packed, kernel):
    """Returns the order in which columns are added up: of 4 bits every fourth one of 128, or every
    second one of 64, comes first.
    """
    order, is_4 = np.arange(packed.num_columns), packed.leaf.dtype in (jnp.uint8, jnp.int4)
    if kernel is matmul512 and is_4 and packed.dtype == jnp.bfloat16 and packed.group % 64 == 0:
        apart = 4 if packed.group % 128 == 0 else 2
        order = order.reshape(-1, 32, apart).swapaxes(1, 2).reshape(-1)
    return order


def in_steps(x, part):
    """Rounds each part of a row to a multiple of 2^-14 of its largest number's power of two."""
    x_TPC = np.asarray(x, np.float64).reshape(len(x), -1, part)
    _, exponents = np.frexp(np.abs(x_TPC).max(axis=-1, keepdims=True))
    steps = 2.0 ** (exponents - 15)
    return (np.rint(x_TPC / steps) * steps).reshape(len(x), -1)


@pytest.mark.parametrize(
    ("num_tokens", "groups", "rows", "columns", "kind", "more", "dtype"), OF_EACH_DTYPE
)
def test_packed_weights_are_multiplied_as_the_numbers_they_stand_for(
    num_tokens, groups, rows, columns, kind, more, dtype, kernel
):
    x = random((num_tokens, groups * columns), dtype)
    packed, w_FD, after = packed_of(kind, groups, rows, columns, dtype, **more)
    assert packed.is_native

    product = jax.jit(lambda x: linear(x, packed))
    y = product(x)

    if part := part_of(packed, kernel):
        exact_x, exact_w = in_steps(x, part), w_FD * after[:, None]
        error = np.abs(y - exact_x @ exact_w.T) / (np.abs(exact_x) @ np.abs(exact_w.T))
        assert error.max() < 1e-6  # what float32 makes of exact sums of a part
    else:
        order = order_of(packed, kernel)
        w_FD = jnp.asarray(w_FD, jnp.float32).astype(dtype)[:, order]
        plain = jax.jit(native.matmul)(x[:, order], w_FD[None], 0)
        np.testing.assert_array_equal(y, np.asarray(plain) * after)
    np.testing.assert_array_equal(y[-1:], product(x[-1:]))


def test_infinities_and_tiny_numbers_stay_in_their_rows_of_whole_numbers(kernel):
    packed, w_FD, after = packed_of("pairs", 2, 32, 64, jnp.bfloat16, zeros=True)
    x = np.array(random((5, 128), jnp.bfloat16))
    x[0, 3], x[1, 70], x[2, :64], x[3] = np.inf, np.nan, 1e-38, 1e30

    y = np.asarray(jax.jit(lambda x: linear(x, packed))(x))

    assert not np.isfinite(y[:2]).any()
    exact_x, exact_w = np.asarray(x[2:], np.float64), w_FD * after[:, None]
    error = np.abs(y[2:] - exact_x @ exact_w.T) / (np.abs(exact_x) @ np.abs(exact_w.T))
    assert error.max() < 2**-8  # other kernels round w to bfloat16


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_value_stands_for_its_number(kind, dtype, kernel):
    values = np.arange(256, dtype=np.uint8)
    if kind in ("pairs", "int4"):
        values = values.astype(np.int8) << 4 >> 4
    values = np.tile(values.view(np.int8), (16, 1))[None, None]
    leaf = in_pairs(values) if kind == "pairs" else values
    if kind == "float8_e4m3fn":
        leaf = np.where(values & 127 == 127, np.int8(0), values).view(kind)  # no NaN
    elif kind != "pairs":
        leaf = values.astype(kind)
    leaf, scales = jnp.asarray(leaf), jnp.ones((1, 1, 16))
    packed = Packed(leaf, scales, None, None, None, 0, np.dtype(dtype))

    found = jax.jit(lambda x: linear(x, packed))(jnp.eye(256, dtype=dtype))

    numbers = values if kind == "pairs" else leaf
    np.testing.assert_array_equal(found, np.asarray(numbers[0, 0], np.float32).T)


def test_packed_weights_of_groups_that_do_not_fill_a_vector_are_left_to_xla(kernel):
    assert not packed_of("int8", 2, 32, 16, jnp.float32)[0].is_native
    assert not packed_of("int8", 2, 24, 32, jnp.float32)[0].is_native


@pytest.mark.parametrize(
    ("scales", "zeros"), [(jnp.float16, jnp.int8), (jnp.bfloat16, jnp.bfloat16)]
)
def test_scales_and_zero_points_of_other_dtypes_are_refused(scales, zeros):
    w = jnp.ones((1, 2, 16, 32), jnp.int8)
    more = jnp.ones((1, 2, 16), scales), jnp.ones((1, 2, 16), zeros)
    with pytest.raises(TypeError, match="expected scales or zeros of"):
        native.matmul_packed(jnp.ones((1, 64)), w, 0, *more, None, np.dtype("float32"))


@pytest.mark.parametrize("num_tokens", [3, 130])
def test_int8_dynamic_has_the_bits_that_xla_gives_it(num_tokens, kernel):
    rng = np.random.default_rng(0)
    x = random((num_tokens, 64), jnp.bfloat16)
    leaf = jnp.asarray(rng.integers(-127, 128, (2, 3, 1, 48, 64), np.int8))
    scales = random((2, 3, 1, 48), jnp.float32, seed=1)
    place = (jnp.int32(1), jnp.int32(2))
    w = Packed(leaf, scales, None, None, None, place, np.dtype(jnp.bfloat16), is_dynamic=True)
    assert w.is_native

    ours, xla = (
        jax.jit(form)(x) for form in (lambda x: linear(x, w), lambda x: w.dot(x, 0, w.num_rows))
    )

    np.testing.assert_array_equal(ours, xla)


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_takes_layers_experts_and_bits(dtype, kernel):
    x, w = random((5, 64), dtype), random((2, 3, 32, 64), dtype, seed=1)
    bits = w.view(jnp.uint16) if dtype == jnp.bfloat16 else w
    cases = [
        (Matrix(w[0], 1), w[0, 1]),
        (Matrix(w[0, 2]), w[0, 2]),
        (Matrix(bits, jnp.int32(1)).of_expert(jnp.int32(2)), w[1, 2]),
    ]
    for matrix, values in cases:
        assert matrix.is_native
        y = jax.jit(lambda x, matrix=matrix: linear(x, matrix))(x)
        check(y, x, values, kernel)


def test_derivatives_are_those_of_the_plain_product():
    x, w = random((5, 64), jnp.float32), random((2, 32, 64), jnp.float32, seed=1)
    given = random((5, 32), jnp.float32, seed=2)

    def derivatives(product):
        return jax.vjp(product, x, w)[1](given)

    ours = derivatives(lambda x, w: native.matmul(x, w, 1))
    plain = derivatives(lambda x, w: jnp.dot(x, w[1].T, precision="highest"))

    for one, other in zip(ours, plain, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_derivatives_with_packed_weights_are_those_of_xla():
    packed, _, _ = packed_of("pairs", 2, 32, 32, jnp.float32, zeros=True)
    x, given = random((5, 64), jnp.float32), random((5, 32), jnp.float32, seed=2)

    ours, xla = (
        jax.vjp(product, x)[1](given)[0]
        for product in (packed.dot_natively, lambda x: packed.dot(x, 0, 32))
    )

    np.testing.assert_allclose(ours, xla, rtol=1e-5, atol=1e-5)


def test_what_vmap_makes_several_of_is_one_call(kernel):
    """Unless matrices are mapped too, or there are products of products."""
    x, w = np.array(random((4, 3, 64), jnp.float32)), random((2, 32, 64), jnp.float32, seed=1)
    x[2, 1:], x[3], index = 0, 0, jnp.int32([1, 0, 1, 9])  # rows and products of zeros alone

    def together(x, index):
        return jax.vmap(native.matmul, in_axes=(0, None, 0))(x, w, index)

    y = together(x, index)
    for number, x_TD, y_TF in zip(index, x, y, strict=True):
        check(y_TF, x_TD, w[min(number, 1)], kernel)
    (call,) = re.findall(r"ffi_call\[|scan\[|while\[", str(jax.make_jaxpr(together)(x, index)))
    assert call == "ffi_call["
    np.testing.assert_array_equal(jax.vmap(lambda x: native.matmul(x, w, 1))(x)[:3:2], y[:3:2])
    np.testing.assert_array_equal(
        jax.vmap(native.matmul)(x[:2], w[::-1][:, None], index[:2]), y[:2]
    )
    np.testing.assert_array_equal(jax.vmap(together)(x[None], index[None]), y[None])


@pytest.mark.parametrize(
    ("kind", "groups", "columns", "more"),
    [
        ("pairs", 1, 128, {}),
        ("pairs", 2, 64, {"zeros": True}),
        ("pairs", 2, 32, {"table": True, "factor": True}),
        ("int8", 2, 32, {"zeros": True}),
    ],
)
def test_packed_weights_of_several_experts_are_one_call(kind, groups, columns, more, kernel):
    packed, _, _ = packed_of(kind, groups, 32, columns, jnp.bfloat16, **more)
    x, expert_P = random((4, 2, groups * columns), jnp.bfloat16), jnp.int32([2, 0, 2, 1])

    def product(x, expert):
        return linear(x, replace(packed, layer=(1, expert)))

    y = jax.vmap(product)(x, expert_P)

    for one, (x_TD, expert) in zip(y, zip(x, expert_P, strict=True), strict=True):
        np.testing.assert_array_equal(one, product(x_TD, expert))


@pytest.mark.parametrize(
    ("num_tokens", "weighs_input"),
    some(itertools.product((2, 9), (False, True)), (2, True), (9, False)),
)
def test_experts_at_once_give_what_they_give_one_after_the_other(num_tokens, weighs_input, kernel):
    rng = np.random.default_rng(0)
    chosen = np.array([rng.permutation(3)[:2] for _ in range(num_tokens)])
    chosen[1] = 3  # none
    chosen[2:6] = [1, 2]
    x, weight = random((num_tokens, 64), jnp.bfloat16), random(chosen.shape, jnp.float32)
    packed, _, _ = packed_of("pairs", 2, 32, 32, jnp.bfloat16, zeros=True)
    plain, bias = random((2, 3, 64, 32), jnp.bfloat16), random((2, 3, 64), jnp.float32)

    def run(x, expert):
        y = linear(x, replace(packed, layer=1).of_expert(expert))
        own = Vectors(bias, 1).of_expert(expert)
        return linear(y, Matrix(plain, 1).of_expert(expert), own)

    at_once, in_turn = (
        run_experts(
            x,
            jnp.int32(chosen),
            weight,
            run,
            num_experts=3,
            on_input=weighs_input,
            is_native=is_native,
        )
        for is_native in (True, False)
    )

    np.testing.assert_array_equal(at_once, in_turn)
    assert [bool(row.any()) for row in at_once] == [token != 1 for token in range(num_tokens)]


def test_threads_do_not_get_in_each_others_way(kernel):
    w = random((2, 512, 256), jnp.bfloat16, seed=1)
    xs = [random((rows, 256), jnp.bfloat16, seed=rows) for rows in (1, 2, 9, 140)]
    product = jax.jit(native.matmul)
    expected = [product(x, w, 1) for x in xs]

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda i: product(xs[i % 4], w, 1), range(80)))

    for x, y in zip(xs, expected, strict=True):
        check(y, x, w[1], kernel)
    for i, y in enumerate(results):
        np.testing.assert_array_equal(y, expected[i % 4])


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((3, 24, 64), "bfloat16"),
        ((3, 32, 40), "float32"),
        ((32, 64), "int16"),
        ((1, 32, 2**17 + 64), "int8"),
    ],
)
def test_other_shapes_and_dtypes_are_left_to_xla(shape, dtype, kernel):
    assert not native.takes(shape, np.dtype(jnp.dtype(dtype)))


def store_of(case):
    """Pages as a CPU has them, with the step's keys and values."""
    shape = case.shape
    codec = PlainCodec(dtype=shape.dtype)
    if shape.num_bits:
        codec = ScaledCodec(kind="int8", dtype=shape.dtype)
    layout = HeadMajorLayout(
        num_kv_heads=shape.kv_heads, head_dim=shape.head_dim, page_size=shape.page_size, codec=codec
    )
    return Store(jax.jit(codec.encode)(written(case)), layout=layout, num_layers=NUM_LAYERS)


def attend_natively(case, store):
    shape, arrays, sinks = case.shape, case.arrays, sinks_of(case.shape)
    tables = PageTables(*(arrays[name] for name in ("table_BW", "first_BW", "len_B")))
    at = Place(store, LAYER, tables)
    asked = Scores(
        shape.window,
        None,
        shape.softcap or 0.0,
        None if sinks is None else jnp.asarray(sinks).reshape(shape.kv_heads, -1),
    )
    batch = Batch(
        token_T=case.row_T,
        position_T=jnp.asarray(case.position_T, jnp.int32),
        row_T=jnp.asarray(case.row_T, jnp.int32),
        start_B=arrays["start_B"],
        count_B=arrays["count_B"],
        num_decode=case.num_decode,
        num_rows=case.num_rows,
        decode_only=shape.decode_only,
    )
    q = arrays["q_TNH"].astype(np.float32) * np.float32(shape.head_dim**-0.5)
    run = jax.jit(partial(attend, handler=handler_for(at), asked=asked))
    return np.asarray(run(q, at, batch)[0])


def rounded(case):
    """The same with queries that are of the pages' dtype when they have been scaled."""
    scale = case.shape.head_dim**-0.5
    scaled = jnp.asarray(case.arrays["q_TNH"] * np.float32(scale), case.shape.dtype)
    q_TNH = np.asarray(scaled, np.float32) / np.float32(scale)
    return replace(case, arrays=case.arrays | {"q_TNH": q_TNH})


ATTENDED = [
    Shape(decode_only=True),
    Shape(),
    Shape(head_dim=64, num_heads=22, dtype="float32"),
    Shape(head_dim=192, num_heads=6, kv_heads=1, page_size=128),
    Shape(window=20, sinks=True),
    Shape(window=20, softcap=3.0, page_size=48, dtype="float32", decode_only=True),
    Shape(num_bits=8, head_dim=64, window=20, dtype="float32"),
]


def as_it_is(case: Case) -> Case:
    return case


CHANGED = [(shape, as_it_is) for shape in ATTENDED]
FAST = [*CHANGED, (ATTENDED[1], first_page_shared), (ATTENDED[5], first_page_shared)]
FAST.append((ATTENDED[4], first_page_behind))
CHANGED += [(shape, first_page_shared) for shape in ATTENDED]
CHANGED += [(shape, first_page_behind) for shape in ATTENDED if shape.window]


@pytest.mark.parametrize(("shape", "change"), some(CHANGED, *FAST))
def test_decode_rows_and_chunks_equal_float64(shape, change):
    for seed in range(2):
        # Rows of several blocks, too.
        held = np.random.default_rng(seed).integers(1, 6 * shape.page_size + 1, NUM_ROWS)
        held[[0, 3]] = 6 * shape.page_size
        case = rounded(change(random_case(seed, shape, held.tolist())))
        real_T = case.row_T < NUM_ROWS

        out = attend_natively(case, store_of(case))

        want, _ = expected(stands_for(case))
        assert_close(out[real_T], want[real_T], shape.dtype)
        assert not out[~real_T].any()


@pytest.mark.parametrize("shape", [ATTENDED[1], ATTENDED[4]])
def test_neither_rows_beside_a_token_nor_its_chunk_change_a_bit(shape, monkeypatch):
    case = random_case(3, replace(shape, num_heads=22))
    store = store_of(case)
    together = attend_natively(case, store)
    group = 22 // shape.kv_heads
    assert max(case.arrays["count_B"]) > attention_native.CHUNK_QUERIES // group

    for tokens in (1, 3, 64):
        monkeypatch.setattr(attention_native, "CHUNK_QUERIES", tokens * group)
        np.testing.assert_array_equal(attend_natively(case, store), together)


@pytest.mark.parametrize(
    "change",
    [
        {"head_dim": 20},
        {"page_size": 4},
        {"page_size": 256},
        {"codec": get_codec("int4", platform="cpu")},
    ],
)
def test_other_pages_are_left_to_xla(change):
    sizes = {"head_dim": 64, "page_size": 16, "codec": PlainCodec(dtype="bfloat16")}
    layout = HeadMajorLayout(num_kv_heads=1, **sizes | change)
    store = empty_store(num_layers=1, layout=layout, num_pages=1)
    empty = jnp.zeros((1, 1), jnp.int32)

    assert handler_for(Place(store, 0, PageTables(empty, empty, empty[0]))) is None


def test_machine_code_is_kept_for_the_next_start(tmp_path, monkeypatch):
    x, w = random((5, 64), jnp.float32), random((1, 32, 64), jnp.float32, seed=1)
    optimised, register = [], jax.ffi.register_ffi_target
    build = llvm.create_pass_builder
    monkeypatch.setattr(
        llvm, "create_pass_builder", lambda *given: optimised.append(given) or build(*given)
    )

    def start(number, folder):
        """Makes a kernel as a process does, under a name of its own; says how it was made."""
        monkeypatch.setattr(native, "_folder", folder)
        monkeypatch.setattr(
            jax.ffi,
            "register_ffi_target",
            lambda name, *given, **more: register(f"{name}_{number}", *given, **more),
        )
        before = len(optimised)
        native._register.__wrapped__(llvm, features.flatten(), "matmul")
        product = native._Product(f"{matmul256.HANDLERS['float32']}_{number}", 32, jnp.float32)
        np.testing.assert_array_equal(product(x, w, 0), in_order(x, w[0], matmul256))
        return "anew" if len(optimised) > before else "kept"

    assert [start(0, tmp_path), start(1, tmp_path)] == ["anew", "kept"]
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    assert start(2, tmp_path) == "anew"
    assert native._read(file, b"another kernel") is None
    with pytest.warns(UserWarning, match="machine code is not kept for the next start"):
        assert start(3, tmp_path / "missing") == "anew"


LATER = """
import sys, jax, jax.numpy as jnp, numpy as np
from pathlib import Path
from jaxkv.ops import native
from jaxkv.programs.executables import ProgramFiles
programs, kernels = map(Path, sys.argv[1:])
native.prepare(kernels)
files = ProgramFiles(programs, tuple(jax.devices()))
place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
x, w = jnp.ones((2, 32)), jnp.ones((1, 1, 16, 32), jnp.int8)
make = lambda x, w: native.matmul_packed(x, w, 0, jnp.ones((1, 1, 16)), None, None, x.dtype)
given = [jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=place) for one in (x, w)]
program, found = files.take(lambda: jax.jit(make).lower(*given).compile(), given)
print(found, np.unique(program(x, w)))
"""


def test_a_program_that_was_kept_finds_the_machine_code_that_it_calls(tmp_path):
    folders = [tmp_path / name for name in ("programs", "kernels")]
    for folder in folders:
        folder.mkdir()
    command = [sys.executable, "-c", LATER, *map(str, folders)]
    said = [
        subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout
        for _ in range(2)
    ]

    assert said == ["False [32.]\n", "True [32.]\n"]


ENDING = """
import sys, time
from jaxkv.ops import native
imports_s, limit_s, makes_s = map(float, sys.argv[1:])
native.EXIT_S = limit_s
native._import_all = lambda: time.sleep(imports_s)
native.make_all = lambda: (time.sleep(makes_s), print("made"))
native.prepare(None)
"""


@pytest.mark.parametrize(
    ("imports_s", "limit_s", "makes_s", "said"), [(600, 0.1, 0, ""), (0, 0.1, 1, "made\n")]
)
def test_a_process_ends_when_machine_code_is_made_or_imports_take_too_long(
    imports_s, limit_s, makes_s, said, decide
):
    decide(None)
    command = [sys.executable, "-c", ENDING, *map(str, (imports_s, limit_s, makes_s))]

    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)

    assert done.stdout == said


@pytest.mark.parametrize(
    ("features", "asked", "said"),
    [
        ({"fma": True}, None, "the processor has no avx2"),
        ({}, "xla", "JAXKV_CPU_KERNELS asks for it"),
    ],
)
def test_says_why_it_is_not_used(features, asked, said, monkeypatch, decide):
    monkeypatch.setattr("llvmlite.binding.get_host_cpu_features", lambda: features)

    assert re.search(said, decide(asked))


def test_a_wide_processor_without_bfloat16_multiplies_by_xla_and_attends_natively(
    monkeypatch, decide
):
    made = []
    monkeypatch.setattr(native, "_register", lambda llvm, features, kernel: made.append(kernel))
    monkeypatch.setattr(native, "WIDE", (*native.WIDE, "not to be had"))
    known = type(features)({**features, "avx512f": True})
    monkeypatch.setattr("llvmlite.binding.get_host_cpu_features", lambda: known)

    assert decide(None) is None
    assert re.search("not measured .* with avx512f and no .*not to be had", native.described())
    assert made == ["attention"]
    assert decide("native") is None
    assert made == ["attention", "attention", "matmul"]
    assert native.described() == "machine code of jaxkv (AVX2)"


def test_without_llvmlite_xla_multiplies_unless_it_was_asked_for(monkeypatch, decide):
    monkeypatch.setattr(native, "find_spec", lambda name: None)

    assert 'pip install "jaxkv[cpu]"' in decide(None)
    with pytest.raises(ImportError, match="JAXKV_CPU_KERNELS=native: llvmlite is not installed"):
        decide("native")


def test_a_processor_that_cannot_is_refused_where_it_is_asked_for(monkeypatch, decide):
    monkeypatch.setattr("llvmlite.binding.get_host_cpu_features", lambda: {"fma": True})

    with pytest.raises(
        NotImplementedError, match="JAXKV_CPU_KERNELS=native: the processor has no avx2"
    ):
        decide("native")


def test_an_unknown_choice_is_refused_also_before_an_engine_is_made(decide, monkeypatch):
    message = 'JAXKV_CPU_KERNELS: expected "xla" or "native", got "mkl"'
    with pytest.raises(ValueError, match=message):
        decide("mkl")
    monkeypatch.setattr("jaxkv.api.llm.find_model", None)
    with pytest.raises(ValueError, match=message):
        LLM()


def test_an_engine_multiplies_by_it_and_says_so(tmp_path, decide, monkeypatch):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 64}
    make_checkpoint(tmp_path, tiny_config("llama", **sizes))
    prompts = np.random.default_rng(0).integers(3, 151, (3, 20)).tolist()
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=1)

    steps = []

    def kept(program, *given):
        steps.append((given[-1], given := program(*given)))
        return given

    def run(asked):
        decide(asked)
        jax.clear_caches()  # what was traced with the other choice
        llm = LLM(tmp_path, **SMALL | {"block_size": 16})
        programs = engine_of(llm).programs
        step = programs.step
        monkeypatch.setattr(programs, "step", lambda size: partial(kept, step(size)))
        outputs = llm.generate(prompts, params, use_tqdm=False)
        chosen = [next(iter(entry.items())) for one in outputs for entry in one.outputs[0].logprobs]
        program = engine_of(llm).programs.loop(4).as_text()
        return llm.describe(), program, dict(enumerate(chosen))

    said, program, ours = run("native")
    assert "matmuls   machine code of jaxkv" in said
    attending = "jaxkv_attend"
    assert native._code().matmul.HANDLERS["float32"] in program
    assert attending in program
    is_row = np.concatenate([batch.row_T < len(batch.start_B) for batch, _ in steps])
    is_used = np.concatenate([np.asarray(out[2]).any(axis=1) for _, out in steps])
    assert not is_row.all()
    np.testing.assert_array_equal(is_used, is_row)  # padding is zeros, which is not multiplied
    said, program, xla = run("xla")
    assert "matmuls   XLA (JAXKV_CPU_KERNELS asks for it)" in said
    assert "jaxkv_matmul" not in program
    assert attending not in program
    assert [token for token, _ in ours.values()] == [token for token, _ in xla.values()]
    np.testing.assert_allclose(
        [one.logprob for _, one in ours.values()],
        [one.logprob for _, one in xla.values()],
        atol=1e-5,
    )
