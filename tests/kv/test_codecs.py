"""Quantised vectors: how many bytes they take, how far they are off, and that nothing around them
changes a bit.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cases import decode, encode
from jaxkv.kv.codecs import CODECS, bits_per_value, get_codec
from jaxkv.kv.codecs.base import Codec
from jaxkv.kv.codecs.parts import (
    _hadamard_by_additions,
    _hadamard_by_matmul,
    lloyd_max,
    pack_bits,
    restore,
    rotate,
    rotate_query,
    unpack_bits,
)
from tiers import some

pytestmark = pytest.mark.usefixtures("quick_compile")

QUANTISED = [name for name in CODECS if name not in ("bfloat16", "float32")]
make = partial(get_codec, platform="cpu", dtype="float32")


def vectors(num: int, head_dim: int, seed: int = 0) -> np.ndarray:
    """[num, 2, H] of very different lengths, with a channel that is an outlier, as keys have
    them.
    """
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(num, 2, head_dim)) * 2.0 ** rng.integers(-20, 20, (num, 2, 1))
    x[..., 3] *= 30
    return x.astype(np.float32)


def encoded(codec: Codec, x: np.ndarray) -> np.ndarray:
    return np.asarray(encode(codec, x))


def decoded(codec: Codec, stored: np.ndarray) -> np.ndarray:
    return np.asarray(decode(codec, stored))


def back(codec: Codec, x: np.ndarray) -> np.ndarray:
    """What comes back of vectors."""
    return decoded(codec, encoded(codec, x))


def error(codec: Codec, x: np.ndarray) -> np.ndarray:
    """Squared error of each vector, as part of its squared length."""
    x64 = x.astype(np.float64)
    return ((back(codec, x) - x64) ** 2).sum(axis=-1) / (x64**2).sum(axis=-1)


@pytest.mark.parametrize(
    ("name", "of_64", "of_128"),
    [("int8", 1.9, 1.95), ("fp8_e4m3", 1.9, 1.95), ("int4", 3.4, 3.7), ("turboquant3", 4.6, 5.0)],
)
def test_bytes_against_bfloat16(name, of_64, of_128):
    for head_dim, least in ((64, of_64), (128, of_128)):
        stored = jax.eval_shape(make(name).encode, vectors(5, head_dim))
        nbytes = stored.size * stored.dtype.itemsize
        assert 2 * head_dim / (nbytes / 10) >= least
        assert bits_per_value(make(name), head_dim) == 8 * nbytes / (10 * head_dim)


@pytest.mark.usefixtures("as_users")
@pytest.mark.parametrize("name", some(QUANTISED, "int8", "int4", "fp8_e4m3", "turboquant2.5"))
def test_a_vector_gives_the_same_bytes_whatever_is_beside_it(name):
    codec, x = make(name), vectors(130, 64)
    whole = encoded(codec, x)
    for size in (1, 13, 65):
        pieces = [encoded(codec, x[i : i + size]) for i in range(0, len(x), size)]
        np.testing.assert_array_equal(np.concatenate(pieces), whole)
    inside = jax.jit(lambda x, y: codec.encode(jnp.concatenate([x, y])))
    np.testing.assert_array_equal(np.asarray(inside(x[:50], x[50:])), whole)


@pytest.mark.parametrize("name", ["int8", "int4"])
@pytest.mark.parametrize("head_dim", [20, 64, 128])
def test_whole_numbers_are_off_by_half_a_step_of_their_range(name, head_dim):
    x = vectors(50, head_dim)
    seen = x if name == "int8" else np.asarray(jax.jit(rotate)(x))
    values, scale, offset = jax.jit(make(name).elements)(encoded(make(name), x))
    found = np.asarray(values, np.float32) * np.asarray(scale, np.float32)[..., None]
    found += 0 if offset is None else np.asarray(offset)[..., None]
    steps = 254 if name == "int8" else 15
    width = (
        2 * np.abs(seen).max(axis=-1) if name == "int8" else seen.max(axis=-1) - seen.min(axis=-1)
    )
    # Scale and middle are bfloat16: of the range's half they may be off by 2^-8 of it and of the
    # middle.
    rounding = 2.0**-8 * np.abs(seen).max(axis=-1) * 2
    assert (np.abs(found - seen).max(axis=-1) <= width / steps / 2 + rounding).all()


@pytest.mark.parametrize(
    ("name", "mantissa_bits", "smallest"), [("fp8_e4m3", 3, 2.0**-6), ("fp8_e5m2", 2, 2.0**-14)]
)
def test_floats_are_off_by_half_a_unit_of_their_mantissa(name, mantissa_bits, smallest):
    x = vectors(50, 64)
    codec = make(name)
    stored = encoded(codec, x)
    scale = np.asarray(jax.jit(codec.elements)(stored).scale)[..., None]
    # 2^-8 more: the largest one is cut where the rounded scale is too small for it.
    bound = np.maximum(np.abs(x), smallest * scale) * (2.0 ** -(mantissa_bits + 1) + 2.0**-8)
    assert (np.abs(decoded(codec, stored) - x) <= bound).all()


@pytest.mark.parametrize(
    ("num_bits", "expected"), [(1, 0.3634), (2, 0.1175), (3, 0.03454), (4, 0.009497)]
)
def test_the_centroids_have_the_least_distortion_of_a_normal_number(num_bits, expected):
    """Source of the figures: Max 1960, table I."""
    centroids, borders = (x.astype(np.float64) for x in lloyd_max(num_bits))
    z = np.random.default_rng(0).normal(size=2_000_000)
    found = ((centroids[np.searchsorted(borders, z)] - z) ** 2).mean()
    assert found == pytest.approx(expected, rel=5e-3)


@pytest.mark.parametrize(("name", "distortion"), [("turboquant4", 0.0095), ("turboquant3", 0.0345)])
def test_rotated_vectors_are_as_far_off_as_normal_numbers_outlier_or_not(name, distortion):
    # An outlier among 128 channels makes coordinates of two sizes only where it is all there is of
    # the vector.
    x = np.random.default_rng(1).normal(size=(4000, 128)).astype(np.float32)
    x[:, 5] *= 8
    assert error(make(name), x).mean() == pytest.approx(distortion, rel=0.08)


def test_an_outlier_channel_costs_int4_as_little_as_the_rotation_spreads_it():
    x = np.random.default_rng(2).normal(size=(500, 128)).astype(np.float32)
    x[:, 7] *= 40
    low, high = x.min(axis=-1, keepdims=True), x.max(axis=-1, keepdims=True)
    plain = np.round((x - low) / (high - low) * 15) / 15 * (high - low) + low
    others = np.arange(128) != 7

    def of_others(y: np.ndarray) -> float:
        return ((y - x)[:, others] ** 2).sum() / (x[:, others] ** 2).sum()

    assert of_others(back(make("int4"), x)) < of_others(plain) / 2


@pytest.mark.parametrize("name", QUANTISED)
def test_zeros_stay_zeros_and_lengths_are_kept(name):
    codec = make(name)
    x = vectors(200, 64)
    x[:3] = 0
    found = back(codec, x)
    np.testing.assert_allclose(found[:3], 0, atol=1e-28)
    if name.startswith("turboquant"):
        np.testing.assert_allclose(
            np.linalg.norm(found, axis=-1), np.linalg.norm(x, axis=-1), rtol=2.0**-8, atol=1e-28
        )


@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_the_transform_by_a_matmul_is_that_by_additions(head_dim):
    x = jax.random.normal(jax.random.key(head_dim), (5, 3, head_dim))
    by_matmul, by_additions = (
        np.asarray(jax.jit(f)(x)) for f in (_hadamard_by_matmul, _hadamard_by_additions)
    )
    np.testing.assert_allclose(by_matmul, by_additions, rtol=0, atol=2e-5)


@pytest.mark.parametrize("head_dim", [8, 20, 64, 96, 128])
def test_the_rotation_is_orthogonal_and_spreads(head_dim):
    identity, block = np.eye(head_dim, dtype=np.float32), head_dim & -head_dim
    matrix = np.asarray(jax.jit(rotate)(identity))
    np.testing.assert_array_equal(matrix @ matrix.T, block * np.eye(head_dim))
    np.testing.assert_array_equal(np.asarray(jax.jit(restore)(matrix)), identity)
    np.testing.assert_array_equal(np.asarray(jax.jit(rotate_query)(identity)) @ matrix.T, identity)
    np.testing.assert_array_equal(np.sort(np.abs(matrix))[:, -block:], 1)  # all of a block alike
    assert np.count_nonzero(matrix) == head_dim * block


@pytest.mark.parametrize("num_bits", [1, 2, 3, 4])
def test_packed_bits_come_back(num_bits):
    codes = np.random.default_rng(3).integers(0, 2**num_bits, (5, 3, 64)).astype(np.uint8)
    packed = jax.jit(pack_bits, static_argnums=1)(codes, num_bits)
    assert packed.shape == (5, 3, 8 * num_bits)
    unpacked = jax.jit(unpack_bits, static_argnums=1)(packed, num_bits)
    np.testing.assert_array_equal(np.asarray(unpacked), codes)


def test_what_cannot_be_stored_is_refused_by_name():
    with pytest.raises(
        ValueError, match=r"expected auto or one of bfloat16, float32, int8, .*, got 'int3'"
    ):
        make("int3")
    with pytest.raises(ValueError, match="int4 expects an even head_dim, got 5"):
        make("int4").width(5)
    with pytest.raises(
        ValueError, match=r"turboquant2\.5 expects a head_dim that is a multiple of 16, got 24"
    ):
        make("turboquant2.5").width(24)
    assert make("fp8") == make("fp8_e4m3")
