"""Matmuls with a weight that a CPU takes in pieces, against numpy's in float64."""

import itertools
import math
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxkv.ops import layers, matrices, native
from jaxkv.ops.layers import (
    MANY_TOKENS,
    PIECE_BYTES,
    linear,
    linear_by_group,
    rms_norm,
    softmax,
    total,
)
from jaxkv.ops.matrices import LANES, HeadMatrices, Matrix, Packed
from jaxkv.programs.compiler_options import compiler_options
from tiers import some

SHAPE = (1100, 2000)
"""More than two pieces in bfloat16, and more than four in float32; the last is a part of one."""


def weight_and_input(num_tokens: int, *, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """A stack of two layers [2, F, D] and x [T, D], both already rounded to `dtype`."""
    rng = np.random.default_rng(0)
    round_to = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32
    return rng.normal(size=(2, *SHAPE)).astype(round_to), rng.normal(
        size=(num_tokens, SHAPE[1])
    ).astype(round_to)


def stored(w: np.ndarray, *, as_bits: bool) -> jax.Array:
    return jnp.asarray(w.view(np.uint16) if as_bits else w)


@pytest.mark.parametrize(
    ("dtype", "as_bits"), [("float32", False), ("bfloat16", False), ("bfloat16", True)]
)
@pytest.mark.parametrize("num_tokens", [2, MANY_TOKENS])
@pytest.mark.parametrize("layer", some([0, 1], 1))
def test_a_layer_of_a_stack_multiplies_as_in_float64(dtype, as_bits, num_tokens, layer):
    w, x = weight_and_input(num_tokens, dtype=dtype)
    assert w[0].nbytes > 2 * PIECE_BYTES
    assert w[0].nbytes % PIECE_BYTES
    got = jax.jit(linear)(
        jnp.asarray(x, jnp.float32), Matrix(stored(w, as_bits=as_bits), jnp.int32(layer))
    )
    assert got.dtype == jnp.float32
    # Products of bfloat16 values are exact in float32: only the sum of D of them rounds.
    np.testing.assert_allclose(
        got, x.astype(np.float64) @ w[layer].astype(np.float64).T, rtol=0, atol=1e-3
    )


@pytest.mark.parametrize(
    ("dtype", "as_bits"), [("float32", False), ("bfloat16", False), ("bfloat16", True)]
)
def test_bits_of_a_result_do_not_depend_on_the_number_of_tokens(dtype, as_bits):
    w, x = weight_and_input(MANY_TOKENS + 1, dtype=dtype)
    matrix = Matrix(stored(w, as_bits=as_bits), jnp.int32(1))
    many = np.asarray(jax.jit(linear)(jnp.asarray(x, jnp.float32), matrix))
    for num_tokens in (2, 7, 64, MANY_TOKENS - 1):
        few = np.asarray(jax.jit(linear)(jnp.asarray(x[:num_tokens], jnp.float32), matrix))
        np.testing.assert_array_equal(few, many[:num_tokens])


@pytest.mark.parametrize("width", some([13, 64, 577, 32_000], 64, 577))
def test_bits_of_a_sum_do_not_depend_on_the_number_of_rows(width):
    x = np.random.default_rng(0).normal(size=(67, width)).astype(np.float32)
    many = np.asarray(jax.jit(total)(x))
    np.testing.assert_allclose(many, x.astype(np.float64).sum(axis=-1), rtol=0, atol=1e-3)
    for num_rows in (1, 2, 7, 8, 9, 64):
        np.testing.assert_array_equal(np.asarray(jax.jit(total)(x[:num_rows])), many[:num_rows])
    np.testing.assert_array_equal(
        np.asarray(jax.jit(total)(x[:6].reshape(2, 3, width))), many[:6].reshape(2, 3)
    )


def test_bits_of_a_norm_do_not_depend_on_the_number_of_rows():
    x = np.random.default_rng(0).normal(size=(64, 96)).astype(np.float32)
    options = compiler_options(jax.devices()[0], {})  # with vectors as wide as engines have them
    norm = jax.jit(partial(rms_norm, scale=np.ones(96), eps=1e-5), compiler_options=options)

    many = np.asarray(norm(x))

    for num_rows in (1, 2, 5, 8, 12, 16, 33):
        np.testing.assert_array_equal(norm(x[:num_rows]), many[:num_rows])


@pytest.mark.parametrize("width", some([6, 8, 128], 6, 128))
def test_bits_of_a_softmax_do_not_depend_on_the_number_of_rows(width):
    x = 3 * np.random.default_rng(0).normal(size=(32, width)).astype(np.float32)
    many = np.asarray(jax.jit(softmax)(x))
    np.testing.assert_allclose(many, jax.nn.softmax(x), rtol=1e-6)
    for num_rows in (1, 2, 5, 12):
        few = jax.jit(softmax)(x[:num_rows])
        if jax.__version_info__ < (0, 11):  # whose XLA:CPU heeds no barrier
            np.testing.assert_allclose(few, many[:num_rows], rtol=1e-6)
        else:
            np.testing.assert_array_equal(few, many[:num_rows])


@pytest.mark.parametrize(
    "biases", [pytest.param((), marks=pytest.mark.slow), ("gate_bias", "up_bias")]
)
@pytest.mark.parametrize("layer", [None, 1])
@pytest.mark.parametrize(
    ("width", "size"), [(512, 128), (200, 200)]
)  # 200 has no part of whole registers
def test_an_mlp_in_pieces_gives_what_it_gives_at_once(monkeypatch, biases, layer, width, size):
    # Both as XLA multiplies: the machine code for CPUs adds up in another order.
    monkeypatch.setattr(native, "takes", lambda *_: False)
    assert layers._piece_of(width, 150, LANES) == size
    monkeypatch.setattr(layers, "MLP_BYTES", 4 * 24 * 128)
    rng = np.random.default_rng(0)
    shapes = {"gate": (width, 96), "up": (width, 96), "down": (96, width)}
    leaves = {
        name: jnp.asarray(rng.normal(size=(2, *shape)), jnp.bfloat16)
        for name, shape in shapes.items()
    }
    w = {
        name: Matrix(leaf, jnp.int32(1)) if layer else Matrix(leaf[1])
        for name, leaf in leaves.items()
    }
    w |= {name: jnp.asarray(rng.normal(size=width), jnp.bfloat16) for name in biases}
    x = jnp.asarray(rng.normal(size=(24, 96)), jnp.float32)
    at_once, in_pieces = (
        jax.jit(lambda x, w, mlp=mlp: mlp(x, w, join=layers.gated("silu", w)))(x, w)
        for mlp in (layers._mlp_at_once, layers._mlp_in_pieces)
    )
    # The sum over `width` is only added up in another order; rounding to bfloat16 between the
    # matmuls is the same.
    np.testing.assert_allclose(in_pieces, at_once, rtol=0, atol=1e-5 * np.abs(at_once).max())


def test_a_matrix_for_each_head_gives_the_same_bits_whatever_the_number_of_tokens():
    rng = np.random.default_rng(0)
    shapes = (2, 4, 24, 128), (40, 4, 128)
    leaf, x_TND = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
    dot = jax.jit(lambda x: HeadMatrices(jnp.asarray(leaf), jnp.int32(1)).dot(x))
    whole = np.asarray(dot(x_TND))
    np.testing.assert_allclose(whole, np.einsum("tnd,nfd->tnf", x_TND, leaf[1]), atol=1e-4)
    for count in (2, 3, 8):
        np.testing.assert_array_equal(dot(x_TND[:count]), whole[:count])


@pytest.mark.parametrize(
    ("dtype", "as_bits"),
    some([("float32", False), ("bfloat16", False), ("bfloat16", True)], ("bfloat16", True)),
)
def test_groups_of_columns_go_through_rows_of_their_own(dtype, as_bits):
    """As transformers' layer for it, with the same bits whatever the number of tokens."""
    torch = pytest.importorskip("torch")
    deepseek = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    rng, num_groups = np.random.default_rng(0), 4
    to = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32
    w, x = (rng.normal(size=shape).astype(to) for shape in ((2, num_groups * 24, 40), (33, 160)))
    layer = deepseek.DeepseekV4GroupedLinear(40, num_groups * 24, num_groups)
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(w[1].astype(np.float32)))
        want = layer(torch.from_numpy(x.astype(np.float32)).reshape(33, num_groups, 40))
    dot = jax.jit(lambda x, w: linear_by_group(x, Matrix(w, jnp.int32(1))))
    x, leaf = x.astype(np.float32), stored(w, as_bits=as_bits)
    got = np.asarray(dot(x, leaf))
    np.testing.assert_allclose(got, want.reshape(33, -1), rtol=0, atol=1e-4)
    for num_tokens in (2, 7, 16):
        np.testing.assert_array_equal(dot(x[:num_tokens], leaf), got[:num_tokens])


def test_groups_of_columns_go_through_quantised_rows_of_their_own():
    rng, width = np.random.default_rng(0), 256
    leaf = jnp.asarray(rng.integers(-127, 128, (1, 2, 48, width // 2)), jnp.int8)
    scales = jnp.asarray(rng.random((1, 2, 48)), jnp.float32)
    w = Packed(leaf, scales, None, None, None, 0, np.dtype("float32"))
    x = rng.normal(size=(5, 3 * width)).astype(np.float32)
    got = jax.jit(lambda x: linear_by_group(x, w))(x)
    w_FD = np.moveaxis(np.asarray(leaf * scales[..., None])[0], 0, 1).reshape(3, 16, width)
    want = np.einsum("tgd,gfd->tgf", x.reshape(5, 3, width), w_FD).reshape(5, -1)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())


def test_products_of_rounded_inputs_have_no_gradient():
    """It would be 0, and nobody would be told."""
    w, x = jnp.ones((2, 8), jnp.int8), jnp.arange(24.0).reshape(3, 8)
    with pytest.raises(NotImplementedError, match="gradients: inputs of matrices in int8_dynamic"):
        jax.grad(lambda x: matrices._dot_int8(x, w).sum())(x)
    np.testing.assert_allclose(
        jax.vmap(matrices._dot_int8, (0, None))(x[:, None], w)[:, 0], matrices._dot_int8(x, w)
    )


@pytest.mark.parametrize(
    ("num_rows", "is_dynamic"),  # in one piece and in several
    some(itertools.product((128, 5000), (False, True)), (128, True), (5000, False)),
)
def test_what_is_added_to_a_scaled_product_has_the_same_bits_for_any_number_of_tokens(
    num_rows, is_dynamic
):
    rng, width = np.random.default_rng(0), 256
    leaf = jnp.asarray(rng.integers(-127, 128, (1, 1, num_rows, width)), jnp.int8)
    scales = jnp.asarray(rng.random((1, 1, num_rows)), jnp.float32)
    w = Packed(leaf, scales, None, None, None, 0, np.dtype("bfloat16"), is_dynamic=is_dynamic)
    x_TD = jnp.asarray(rng.normal(size=(MANY_TOKENS, width)), jnp.float32)
    r_TF = jnp.asarray(rng.normal(size=(MANY_TOKENS, num_rows)), jnp.float32)
    added = jax.jit(lambda x, r: r + linear(x, w))
    whole = np.asarray(added(x_TD, r_TF))
    for num_tokens in (2, 9, MANY_TOKENS - 1):
        some = added(x_TD[:num_tokens], r_TF[:num_tokens])
        np.testing.assert_array_equal(some, whole[:num_tokens])


@pytest.mark.parametrize("name", ["gelu", "gelu_pytorch_tanh", "silu"])
def test_an_activation_keeps_its_digits_far_below_0(name):
    x = np.linspace(-5, 5, 1001)
    inner = np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)
    erfc = np.array([math.erfc(-one / math.sqrt(2)) for one in x])
    factor = {
        "gelu": erfc / 2,
        "gelu_pytorch_tanh": np.exp(inner) / (np.exp(inner) + np.exp(-inner)),
        "silu": 1 / (1 + np.exp(-x)),
    }
    got = layers.ACTIVATIONS[name](jnp.asarray(x, jnp.float32))
    np.testing.assert_allclose(got, x * factor[name], rtol=1e-5, atol=1e-12)
