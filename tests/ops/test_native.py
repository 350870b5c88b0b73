"""Matmuls by machine code of jaxkv: their bits, derivatives and refusals."""

import re
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import LLM, SamplingParams
from jaxkv.ops import native
from jaxkv.ops.layers import linear
from jaxkv.ops.matrices import Matrix, Packed
from jaxkv.testing import engine_of
from kernels_pallas.cpu import matmul as kernel
from tiny import SMALL, make_checkpoint, tiny_config

llvm = pytest.importorskip("llvmlite.binding")
features = llvm.get_host_cpu_features()
pytestmark = pytest.mark.skipif(
    not all(features.get(name) for name in native.NEEDED), reason="the processor has no AVX2"
)

DTYPES = (jnp.bfloat16, jnp.float32)


@pytest.fixture(autouse=True)
def decide(monkeypatch):
    """Has the machine code used whatever the processor, and decides anew where a test asks to."""

    def decide(asked):
        native._unused_because.cache_clear()
        if asked is None:
            monkeypatch.delenv(native.VARIABLE, raising=False)
        else:
            monkeypatch.setenv(native.VARIABLE, asked)
        return native.unused_because()

    decide("native")
    yield decide
    native._unused_because.cache_clear()


def random(shape, dtype, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def in_order(x, w):
    """Adds up as the machine code says it does. What is added to a product is rounded with it once:
    float64 holds the product.
    """
    x, w = np.asarray(x, np.float64), np.asarray(w, np.float64)
    y = np.zeros((x.shape[0], w.shape[0]), np.float32)
    for start in range(0, x.shape[1], kernel.DEPTH):
        sums = np.zeros((*y.shape, 8), np.float32)
        for k in range(start, min(x.shape[1], start + kernel.DEPTH), 8):
            products = x[:, None, k : k + 8] * w[None, :, k : k + 8]
            sums = (products + sums).astype(np.float32)
        while sums.shape[2] > 1:
            sums = sums[..., ::2] + sums[..., 1::2]
        y += sums[..., 0]
    return y


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_tokens", "columns", "rows"),
    [(1, 16, 16), (2, 784, 80), (7, 512, 48), (9, 784, 80), (130, 256, 128), (300, 48, 176)],
)
def test_adds_up_in_order(dtype, num_tokens, columns, rows):
    x, w = random((num_tokens, columns), dtype), random((3, rows, columns), dtype, seed=1)

    product = jax.jit(native.matmul)

    np.testing.assert_array_equal(product(x, w, 1), in_order(x, w[1]))
    np.testing.assert_array_equal(product(x, w, 7), in_order(x, w[2]))
    np.testing.assert_array_equal(product(x, w, -1), in_order(x, w[0]))


def test_rounds_what_it_multiplies_to_the_dtype_of_the_weights():
    x, w = random((5, 64), jnp.float32), random((1, 32, 64), jnp.bfloat16, seed=1)

    y = jax.jit(native.matmul)(x, w, 0)

    np.testing.assert_array_equal(y, in_order(x.astype(jnp.bfloat16), w[0]))


@pytest.mark.parametrize(
    ("num_tokens", "columns", "rows"), [(1, 16, 16), (6, 272, 80), (200, 48, 176)]
)
def test_products_of_int8_are_exact(num_tokens, columns, rows):
    rng = np.random.default_rng(0)
    x = rng.integers(-127, 128, (num_tokens, columns), np.int8)
    w = rng.integers(-127, 128, (2, rows, columns), np.int8)

    y = jax.jit(native.matmul_int8)(x, w, 1)

    np.testing.assert_array_equal(y, x.astype(np.int64) @ w[1].astype(np.int64).T)


@pytest.mark.parametrize("num_tokens", [3, 130])
def test_int8_dynamic_has_the_bits_that_xla_gives_it(num_tokens):
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
def test_linear_takes_layers_experts_and_bits(dtype):
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
        np.testing.assert_array_equal(y, in_order(x, values))


def test_derivatives_are_those_of_the_plain_product():
    x, w = random((5, 64), jnp.float32), random((2, 32, 64), jnp.float32, seed=1)
    given = random((5, 32), jnp.float32, seed=2)

    def derivatives(product):
        return jax.vjp(product, x, w)[1](given)

    ours = derivatives(lambda x, w: native.matmul(x, w, 1))
    plain = derivatives(lambda x, w: jnp.dot(x, w[1].T, precision="highest"))

    for one, other in zip(ours, plain, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_a_batch_is_multiplied_in_turn():
    x, w = random((4, 3, 64), jnp.float32), random((2, 32, 64), jnp.float32, seed=1)

    y = jax.vmap(lambda x: native.matmul(x, w, 1))(x)

    np.testing.assert_array_equal(y.reshape(12, 32), in_order(x.reshape(12, 64), w[1]))


def test_threads_do_not_get_in_each_others_way():
    w = random((2, 512, 256), jnp.bfloat16, seed=1)
    xs = [random((rows, 256), jnp.bfloat16, seed=rows) for rows in (1, 2, 9, 140)]
    product = jax.jit(native.matmul)
    expected = [in_order(x, w[1]) for x in xs]

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda i: product(xs[i % 4], w, 1), range(80)))

    for i, y in enumerate(results):
        np.testing.assert_array_equal(y, expected[i % 4])


@pytest.mark.parametrize(
    ("shape", "dtype"), [((3, 24, 64), "bfloat16"), ((3, 32, 40), "float32"), ((32, 64), "int16")]
)
def test_other_shapes_and_dtypes_are_left_to_xla(shape, dtype):
    assert not native.takes(shape, np.dtype(jnp.dtype(dtype)))


@pytest.mark.parametrize(
    ("features", "asked", "said"),
    [
        ({"fma": True}, None, "the processor has no avx2"),
        ({"fma": True, "avx2": True, "avx512f": True}, None, "not measured .* with avx512f"),
        ({}, "xla", "JAXKV_MATMUL asks for it"),
    ],
)
def test_says_why_it_is_not_used(features, asked, said, monkeypatch, decide):
    monkeypatch.setattr("llvmlite.binding.get_host_cpu_features", lambda: features)

    assert re.search(said, decide(asked))


def test_without_llvmlite_xla_multiplies_unless_it_was_asked_for(monkeypatch, decide):
    monkeypatch.setattr(native, "find_spec", lambda name: None)

    assert 'pip install "jaxkv[cpu]"' in decide(None)
    with pytest.raises(ImportError, match="JAXKV_MATMUL=native: llvmlite is not installed"):
        decide("native")


def test_a_processor_that_cannot_is_refused_where_it_is_asked_for(monkeypatch, decide):
    monkeypatch.setattr("llvmlite.binding.get_host_cpu_features", lambda: {"fma": True})

    with pytest.raises(NotImplementedError, match="JAXKV_MATMUL=native: the processor has no avx2"):
        decide("native")


def test_an_unknown_choice_is_refused(decide):
    with pytest.raises(ValueError, match='JAXKV_MATMUL: expected "xla" or "native", got "mkl"'):
        decide("mkl")


def test_an_engine_multiplies_by_it_and_says_so(tmp_path, decide):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    make_checkpoint(tmp_path, tiny_config("llama", **sizes))
    prompts = np.random.default_rng(0).integers(3, 151, (3, 20)).tolist()
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=1)

    def run(asked):
        decide(asked)
        jax.clear_caches()  # what was traced with the other choice
        llm = LLM(tmp_path, **SMALL)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        chosen = [next(iter(entry.items())) for one in outputs for entry in one.outputs[0].logprobs]
        program = engine_of(llm).programs.loop(4).as_text()
        return llm.describe(), program, dict(enumerate(chosen))

    said, program, ours = run("native")
    assert "matmuls   machine code of jaxkv" in said
    assert kernel.HANDLERS["float32"] in program
    said, program, xla = run("xla")
    assert "matmuls   XLA (JAXKV_MATMUL asks for it)" in said
    assert kernel.HANDLERS["float32"] not in program
    assert [token for token, _ in ours.values()] == [token for token, _ in xla.values()]
    np.testing.assert_allclose(
        [one.logprob for _, one in ours.values()],
        [one.logprob for _, one in xla.values()],
        atol=1e-5,
    )
