"""Keeps matrices quantised: which form they have on the device, and how a matrix gets it.

A matrix [F, D] becomes values [G, F, D / G] in 4 or 8 bits for G groups of columns, scales [G, F],
and maybe zero points like those. Where 4 bits stand for numbers that are not evenly spaced (E2M1 in
MXFP4 and NVFP4, NF4), a table [16] says for which; NVFP4 has a factor of the whole matrix, too.

XLA for TPUs computes that form within the matmul that reads it; with groups as a part of the
columns, [F, G, D / G], it writes out the matrix first.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

FLOAT32 = np.dtype(np.float32)
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
SCALES, ZEROS, TABLE, FACTOR = "_scales", "_zeros", "_table", "_factor"
"""What follows the name of a leaf in the names of those that it is read with."""

DYNAMIC = "_dynamic_scales"
"""In place of `SCALES` where what a matrix is multiplied with is quantised too."""

GROUP = 128
"""Columns that share a scale in 4 bits, fewer where that is no divisor."""

LEAST_GROUP = 8
"""Columns: with fewer, scales would take as much as the values."""

INT4 = np.dtype(ml_dtypes.int4)
METHODS = {
    "int8": np.dtype(np.int8),
    "int4": INT4,
    "int8_dynamic": np.dtype(np.int8),
    "fp8": np.dtype(ml_dtypes.float8_e4m3fn),
}
"""How weights can be quantised as they are loaded, and what of."""

WITH_HEAD = ("int8_dynamic",)
"""Methods by which the head is quantised too: there it would stay the slowest matmul of a step."""

LARGEST = {"int8": 127.0, "int4": 7.0, "float8_e4m3fn": 448.0}
"""The largest values, which that of a group or row becomes."""


@dataclass(frozen=True, slots=True)
class Packing:
    """Says what a matrix is kept in. group: how many columns share a scale, 0 for all of a row.
    scales: the dtype of those. is_dynamic: what it is multiplied with is quantised too. has_table:
    values are 4 bits that stand for 16 numbers. has_factor: there is a scale of all, too.
    """

    dtype: np.dtype[Any]
    group: int = 0
    scales: np.dtype[Any] = FLOAT32
    has_zeros: bool = False
    is_dynamic: bool = False
    has_table: bool = False
    has_factor: bool = False

    def arrays(
        self, shape: tuple[int, ...], *, in_pairs: bool = False
    ) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
        """Returns shapes and dtypes for matrices [..., F, D], by what follows a leaf's name, with
        values of 4 bits two in a byte if `in_pairs`.
        """
        *stack, rows, columns = shape
        group = self.group or columns
        num_groups, dtype = columns // group, self.dtype
        if in_pairs and dtype == INT4:
            group, dtype = group // 2, np.dtype(np.uint8)
        found = {"": ((*stack, num_groups, rows, group), dtype)}
        of_scales = DYNAMIC if self.is_dynamic else SCALES
        found[of_scales] = ((*stack, num_groups, rows), self.scales)
        if self.has_zeros:
            found[ZEROS] = ((*stack, num_groups, rows), np.dtype(np.int8))
        if self.has_table:
            found[TABLE] = ((*stack, 16), FLOAT32)
        if self.has_factor:
            found[FACTOR] = ((*stack,), FLOAT32)
        return found


Quantise = Callable[[npt.NDArray[Any], Packing], dict[str, npt.NDArray[Any]]]
"""Makes the arrays of a matrix of floats [F, D], with values of 4 bits in pairs."""


def needs_a_program(w_FD: npt.NDArray[Any], packing: Packing) -> dict[str, npt.NDArray[Any]]:
    """Stands where weights are loaded that are not to be quantised. Raises: ValueError."""
    raise ValueError("quantise: expected programs.rounding.quantise beside quantization, got none")


def packing_for(
    method: str, num_columns: int, num_parts: int = 1, *, dtype: str = "float32"
) -> Packing:
    """Returns what a matrix of so many columns is quantised to, which are divided in so many parts
    for as many devices. dtype: what it is multiplied in, which the scales of groups are of.

    Raises: ValueError for columns that 4 bits have no groups for.
    """
    of_values = METHODS[method]
    if of_values != INT4:
        return Packing(of_values, is_dynamic=method == "int8_dynamic")
    group = GROUP
    while num_columns // num_parts % group:
        group //= 2
    if group < LEAST_GROUP:
        raise ValueError(
            f"quantization: expected matrices whose columns on a device are a multiple of "
            f"{LEAST_GROUP} for int4, got {num_columns} columns on {num_parts} devices"
        )
    return Packing(INT4, group, BFLOAT16 if dtype == "bfloat16" else FLOAT32)


def in_pairs(x: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """Packs values of 4 bits [..., C] in bytes [..., C / 2], the first in the lower half."""
    pairs = np.ascontiguousarray(x).view("<u2")
    return (pairs & 15 | pairs >> 4 & 240).astype(np.uint8)


_BYTES = np.arange(256, dtype=np.uint8)
_PAIRS = (np.stack([_BYTES & 15, _BYTES >> 4], axis=-1) ^ 8).view(np.int8) - np.int8(8)
_PAIRS = _PAIRS.view(np.int16)[:, 0]
"""Two values of 4 bits side by side for each byte: one look-up takes a third of the time."""


def from_pairs(x: npt.NDArray[np.uint8]) -> npt.NDArray[Any]:
    """Returns the values that `in_pairs` has packed."""
    return _PAIRS[x].view(np.int8).view(INT4)


def base_name(name: str) -> str:
    """Returns the name of the leaf that this one is, or is read with."""
    for suffix in (DYNAMIC, SCALES, ZEROS, TABLE, FACTOR):
        name = name.removesuffix(suffix)
    return name


def num_bytes(shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
    """Counts the bytes of an array on a device, where two values of 4 bits share one."""
    size = math.prod(shape)
    return -(-size // 2) if dtype == INT4 else size * dtype.itemsize
