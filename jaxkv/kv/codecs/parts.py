"""Holds what codecs are made of: numbers as bytes, sums in a fixed order, a rotation."""

from __future__ import annotations

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

SMALLEST = 2.0**-100
"""A scale is at least this: that of a zero vector must not divide by 0."""

SIGNS_SEED = 20260611


def to_bfloat16(x: jax.Array) -> jax.Array:
    """float32 values rounded to what a bfloat16 holds. XLA drops a pair of conversions, this it
    keeps.
    """
    return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)


def as_bytes(x: jax.Array) -> jax.Array:
    """Numbers [...] as two bytes [..., 2], bfloat16."""
    return jax.lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint8)


def of_bytes(stored: jax.Array) -> jax.Array:
    """[..., 2] -> [...] float32. By shifts: XLA:CPU takes bytes together one at a time."""
    low, high = (stored[..., i].astype(jnp.uint32) for i in (0, 1))
    return jax.lax.bitcast_convert_type(low << 16 | high << 24, jnp.float32)


def square_sum(x: jax.Array) -> jax.Array:
    """Sums of squares over the last axis, in the same order however many there are."""
    x = x * x
    while x.shape[-1] > 1:
        half, odd = divmod(x.shape[-1], 2)
        folded = x[..., :half] + x[..., half : 2 * half]
        x = jnp.concatenate([folded, x[..., 2 * half :]], axis=-1) if odd else folded
    return x[..., 0]


def pack_bits(codes: jax.Array, num_bits: int) -> jax.Array:
    """Whole numbers [..., H] below 2**num_bits, H a multiple of 8 -> [..., H * num_bits / 8] bytes,
    bit after bit.
    """
    eighths = codes.astype(jnp.uint8).reshape(*codes.shape[:-1], 8, -1)
    planes = []
    for bit in range(num_bits):
        ones, plane = (eighths >> bit) & 1, jnp.zeros_like(eighths[..., 0, :])
        for i in range(8):
            plane |= ones[..., i, :] << i
        planes.append(plane)
    return jnp.concatenate(planes, axis=-1)


def unpack_bits(stored: jax.Array, num_bits: int) -> jax.Array:
    """Returns what `pack_bits` was given, uint8."""
    planes = stored.reshape(*stored.shape[:-1], num_bits, 1, -1)
    shift = np.arange(8, dtype=np.uint8).reshape(*[1] * (planes.ndim - 2), 8, 1)
    bits = (planes >> shift) & 1
    codes = jnp.zeros_like(bits[..., 0, :, :])
    for bit in range(num_bits):
        codes |= bits[..., bit, :, :] << bit
    return codes.reshape(*stored.shape[:-1], -1)


def rotate(x: jax.Array) -> jax.Array:
    """R x of vectors [..., H]: signs, the Hadamard transform of each power of two, signs; sqrt(2^n)
    longer than x.

    It spreads what one channel has over all. Without the root every factor is exact, and with signs
    first and last no product is added to anything: one that is may be rounded once or twice, as the
    compiler likes.
    Source: QuaRot, arXiv 2404.00456, section 3.
    """
    first, last = _signs(x)
    return _hadamard(x * first) * last


def rotate_query(x: jax.Array) -> jax.Array:
    """Returns what meets R k as x meets k."""
    return rotate(x) / _block(x.shape[-1])


def restore(x: jax.Array) -> jax.Array:
    """Returns x of R x: the transform is its own inverse but for the length."""
    first, last = _signs(x)
    return _hadamard(x * last) * first / _block(x.shape[-1])


def _hadamard(x: jax.Array) -> jax.Array:
    return jax.lax.platform_dependent(x, tpu=_hadamard_by_matmul, default=_hadamard_by_additions)


def _hadamard_by_matmul(x: jax.Array) -> jax.Array:
    """Multiplies, which a TPU is made for: it has no good place for halves of a register."""
    size = _block(x.shape[-1])
    signs = np.ones((1, 1), np.float32)
    while len(signs) < size:
        signs = np.kron(np.array([[1, 1], [1, -1]], np.float32), signs)
    blocks = x.reshape(*x.shape[:-1], -1, size)
    return jnp.matmul(blocks, signs, precision=jax.lax.Precision.HIGHEST).reshape(x.shape)


def _hadamard_by_additions(x: jax.Array) -> jax.Array:
    """On a CPU a matmul would add in an order that depends on how many vectors there are."""
    step = 1
    while step < _block(x.shape[-1]):
        pairs = x.reshape(*x.shape[:-1], -1, 2, step)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        x = jnp.stack([a + b, a - b], axis=-2).reshape(x.shape)
        step *= 2
    return x


def _block(head_dim: int) -> int:
    """Returns the largest power of two that divides it."""
    return head_dim & -head_dim


def _signs(x: jax.Array) -> tuple[np.ndarray, np.ndarray]:
    """Twice +-1 for each coordinate, of x's rank."""
    head_dim = x.shape[-1]
    signs = np.random.default_rng(SIGNS_SEED).choice(np.array([-1, 1], np.float32), (2, head_dim))
    first, last = signs.reshape(2, *[1] * (x.ndim - 1), head_dim)
    return first, last


@cache
def lloyd_max(num_bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns (centroids, the borders between them) that store a standard normal number in
    `num_bits` with the least squared error. Source: Lloyd 1982, Max 1960; mean squared errors
    .3634, .1175, .0345, .0095 at 1 to 4 bits.
    """
    grid = np.linspace(-8, 8, 200_001)
    density = np.exp(-grid * grid / 2)
    centroids = np.linspace(-2, 2, 2**num_bits)
    for _ in range(2000):
        borders = (centroids[1:] + centroids[:-1]) / 2
        of = np.searchsorted(borders, grid)
        mass, moment = (np.bincount(of, weights) for weights in (density, density * grid))
        new = moment / mass
        if np.abs(new - centroids).max() < 1e-9:
            break
        centroids = new
    return centroids.astype(np.float32), ((centroids[1:] + centroids[:-1]) / 2).astype(np.float32)
