"""Quantises matrices of floats as they are loaded."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jaxkv.weights.packing import INT4, LARGEST, Packing

LEAST4 = -8

CUT = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)
"""Scales that are tried in 4 bits, as parts of those that cut nothing off."""

TINY = 1e-30

AT_ONCE = 2**18
"""Values that are quantised together: few enough to stay in a processor's cache, and so many that
threads seldom wait for each other to call numpy or a program.
"""


def quantise(w_FD: npt.NDArray[Any], packing: Packing) -> dict[str, npt.NDArray[Any]]:
    """Rounds a matrix of floats to multiples of its scales, values of 4 bits in pairs. Symmetric:
    there are no zero points. The largest value of a group becomes the largest that there is; in 4
    bits it may be cut off where that lessens the squared error of the group.
    """
    arrays = packing.arrays(w_FD.shape, in_pairs=True).items()
    made = {suffix: np.empty(shape, dtype) for suffix, (shape, dtype) in arrays}
    values_GFC, scales_GF = made.values()
    num_groups, num_rows = scales_GF.shape
    group = w_FD.shape[1] // num_groups
    rounded = _to_4_bits if packing.dtype == INT4 else _to_8_bits
    piece = max(1, AT_ONCE // w_FD.shape[1])

    def run(start: int) -> None:
        rows = slice(start, start + piece)
        w_KC = w_FD[rows].astype(np.float32, copy=False).reshape(-1, group)
        values_KC, scales_K = rounded(w_KC, packing)
        of_rows = (-1, num_groups)
        values_GFC[:, rows] = values_KC.reshape(*of_rows, values_KC.shape[1]).swapaxes(0, 1)
        scales_GF[:, rows] = scales_K.reshape(of_rows).T

    with ThreadPoolExecutor() as threads:  # numpy and programs let others run meanwhile
        list(threads.map(run, range(0, num_rows, piece)))
    return made


def _to_8_bits(w_KC: npt.NDArray[np.float32], packing: Packing) -> Sequence[npt.NDArray[Any]]:
    """Returns values and scales of groups."""
    dtype, most = packing.dtype, LARGEST[packing.dtype.name]
    largest = np.abs(w_KC).max(axis=1, keepdims=True)
    scale = np.where(largest < TINY, 1, largest) / np.float32(most)  # which is not 0
    scale = scale.astype(packing.scales).astype(np.float32)
    found = w_KC / scale
    if dtype == np.int8:
        np.rint(found, out=found)
    return np.clip(found, -most, most).astype(dtype), scale[:, 0]


def _to_4_bits(w_KC: npt.NDArray[np.float32], packing: Packing) -> Sequence[npt.NDArray[Any]]:
    """Returns values in pairs and scales of groups, of at most so many that matrices with rows of
    any length, whose groups are of one size, have one program.
    """
    used, group = w_KC.shape
    w_KC = np.pad(w_KC, ((0, max(0, AT_ONCE // group - used)), (0, 0)))
    return [np.asarray(x)[:used] for x in _searched(w_KC, packing.scales)]


@partial(jax.jit, static_argnums=1)
def _searched(w_KC: jax.Array, of_scales: np.dtype[Any]) -> tuple[jax.Array, jax.Array]:
    """Tries scales for each group. Returns values in pairs [K, C / 2], uint8, and scales [K]."""

    def stored(scale: jax.Array) -> jax.Array:
        return scale.astype(of_scales).astype(jnp.float32)

    def rounded(scale: jax.Array) -> jax.Array:
        return jnp.clip(jnp.rint(w_KC / scale), LEAST4, LARGEST["int4"])

    def squared_error(scale: jax.Array) -> jax.Array:
        return jnp.sum(jnp.square(rounded(scale) * scale - w_KC), axis=1, keepdims=True)

    highest, lowest = (of(w_KC, axis=1, keepdims=True) for of in (jnp.max, jnp.min))
    extreme = jnp.where(highest >= -lowest, highest, lowest)
    extreme = jnp.where(jnp.abs(extreme) < TINY, 1, extreme)  # else scales might be 0
    scale = stored(jnp.abs(extreme) / LARGEST["int4"])
    least = squared_error(scale)
    for part in CUT:
        # The extreme becomes -8 or is cut off there, so that all sixteen values count.
        tried = stored(extreme * (part / LEAST4))
        error = squared_error(tried)
        scale, least = jnp.where(error < least, tried, scale), jnp.minimum(error, least)
    values_KC = rounded(scale).astype(jnp.int8).astype(jnp.uint8) & 15
    return values_KC[:, ::2] | values_KC[:, 1::2] << 4, scale[:, 0].astype(of_scales)
