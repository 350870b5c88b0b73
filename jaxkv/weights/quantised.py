"""Reads quantised checkpoints: a weight stays packed in the form of `weights.packing` where that
can hold it, or is computed from what is stored when it is asked for.

Values are little-endian in their int32, the first in the lowest bits. Sources: the formats as the
libraries that write them define them, github.com/AutoGPTQ/AutoGPTQ (gptq), casper-hansen/AutoAWQ
(awq), vllm-project/compressed-tensors, and for blocks of fp8 arXiv 2412.19437, section 3.3.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from jaxkv.errors import CheckpointError
from jaxkv.models.families.base import Part
from jaxkv.models.quantisation import Quantisation
from jaxkv.weights.packing import INT4, SCALES, ZEROS, Packing
from jaxkv.weights.safetensors import Checkpoint, TensorEntry

FLOAT32 = np.dtype(np.float32)
KEPT = (FLOAT32, np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
"""What scales may stay; others become float32."""

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""At which place in its int32 each of eight neighbours is."""

STORED = {
    "scaled": "weight",
    "packed": "weight_packed",
    "gptq": "qweight",
    "awq": "qweight",
    "mxfp4": "blocks",
}
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
FP4 = np.concatenate([FP4, -FP4])
"""What 4 bits of E2M1 mean."""

SCALE_NAMES = ("weight_scale_inv", "weight_scale")
NOT_WEIGHTS = (".input_scale", ".input_zero_point", ".output_scale", ".k_scale", ".v_scale")
"""What is stored of activations, which are not quantised here."""


class Dequantised:
    """Stands for a checkpoint whose weights are not quantised: the same names, shapes and reads as
    `Checkpoint`. A weight that is read is a float32 array of its own.

    known: the names that the model computes with. Biases that it has not are left out where they
    are zeros, as some libraries write them.
    """

    def __init__(self, checkpoint: Checkpoint, how: Quantisation, known: Container[str]) -> None:
        self.directory = checkpoint.directory
        self._checkpoint, self._how = checkpoint, how
        self._parts: dict[str, dict[str, str]] = {}
        """For each quantised weight its stored tensors by their last name."""
        used = {name for name in checkpoint.entries if name.endswith(NOT_WEIGHTS)}
        joint, whole = ("_", "") if how.kind == "mxfp4" else (".", ".weight")
        stored = f"{joint}{STORED[how.kind]}"
        for name in checkpoint.entries:
            if name.endswith(stored) and self._is_quantised(name):
                module = name.removesuffix(stored)
                own = {
                    last: f"{module}{joint}{last}"
                    for last in self._lasts
                    if f"{module}{joint}{last}" in checkpoint.entries
                }
                self._parts[f"{module}{whole}"] = own
                used |= set(own.values())
                bias = f"{module}.bias"
                if bias in checkpoint.entries and bias not in known:
                    used |= set() if checkpoint.read(bias).any() else {bias}
        entries = {name: entry for name, entry in checkpoint.entries.items() if name not in used}
        for name, own in self._parts.items():
            entry = checkpoint.entries[own[STORED[how.kind]]]
            shape = self._shape(own)
            nbytes = math.prod(shape) * FLOAT32.itemsize
            entries[name] = replace(entry, name=name, dtype=FLOAT32, shape=shape, nbytes=nbytes)
        self.entries: Mapping[str, TensorEntry] = entries

    def read(self, name: str) -> npt.NDArray[Any]:
        """Reads or computes a tensor. Raises: CheckpointError if what it is made of does not fit
        together.
        """
        if name not in self._parts:
            return self._checkpoint.read(name)
        if self._how.kind == "mxfp4":
            return self._mxfp4(name)
        return self._stored(name).weight()

    def packing(self, names: Sequence[str], num_parts: int) -> Packing | None:
        """Returns what these weights, of layers of one kind, can all be kept in; None where they
        have to be computed. num_parts: into how many their columns are divided.
        """
        if not all(name in self._parts for name in names):
            return None
        found = {self._packing(name, num_parts) for name in names}
        return found.pop() if len(found) == 1 else None

    def _packing(self, name: str, num_parts: int) -> Packing | None:
        own, width = self._parts[name], self.entries[name].shape[-1]
        entries = self._checkpoint.entries
        if self._how.kind == "mxfp4":
            return None
        scales = next((own[last] for last in (*SCALE_NAMES, "scales") if last in own), None)
        if scales is None or len(self.entries[name].shape) != 2:
            return None  # to be refused when it is read
        shape, dtype = entries[scales].shape, entries[scales].dtype
        if len(shape) != 2:
            num_groups = 1
        else:
            num_groups = shape[0] if self._how.kind in ("gptq", "awq") else shape[1]
        group = self._how.block[1] if num_groups > 1 else 0
        is_odd = self._how.bits == 4 and (group or width) % 2
        if is_odd or (group and (width != group * num_groups or width // num_parts % group)):
            return None
        if "g_idx" in own:
            of_columns = np.arange(width) // (group or width)
            if not np.array_equal(self._checkpoint.read(own["g_idx"]), of_columns):
                return None  # columns of a group are not neighbours
        values = entries[own[STORED[self._how.kind]]].dtype
        if self._how.kind != "scaled":
            values = INT4 if self._how.bits == 4 else np.dtype(np.int8)
        has_zeros = not own.keys().isdisjoint(("qzeros", "weight_zero_point"))
        return Packing(values, group, dtype if dtype in KEPT else FLOAT32, has_zeros)

    def packed(self, name: str, packing: Packing, part: Part | None) -> dict[str, Any]:
        """Returns the arrays of a weight, or a part of it, as it is kept."""
        return self._stored(name).packed(packing, part)

    def _stored(self, name: str) -> _Stored:
        """Raises: CheckpointError if what the weight is made of does not fit together."""
        own = {last: self._checkpoint.read(full) for last, full in self._parts[name].items()}
        try:
            compute = {"scaled": _scaled, "packed": _packed, "gptq": _gptq, "awq": _awq}
            found = compute[self._how.kind](own, self._how)
            found.check()
            if found.values.shape != self.entries[name].shape:
                raise ValueError(f"they make {list(found.values.shape)}")
        except (KeyError, ValueError, IndexError) as error:
            shapes = ", ".join(f"{last} {list(x.shape)}" for last, x in own.items())
            raise CheckpointError(
                f"{self.entries[name].file}: {name}: expected the parts of a weight by "
                f"{self._how.method}, got {shapes} ({error})"
            ) from error
        return found

    def _mxfp4(self, name: str) -> npt.NDArray[np.float32]:
        """Computes the weights [E, in, out] of all experts. Raises: CheckpointError.

        Blocks [E, out, in / 32, 16] hold pairs of 4 bits, the first in the lower half; each block
        of 32 has a power of two. Source: OCP Microscaling Formats (MX) 1.0, sections 5.3 and 5.4.
        """
        own = {last: self._checkpoint.read(full) for last, full in self._parts[name].items()}
        blocks, scales = own["blocks"], own.get("scales")
        fits = blocks.dtype == np.uint8 and blocks.ndim == 4 and blocks.shape[-1] == 16
        if scales is not None:
            fits = fits and scales.dtype == np.uint8 and scales.shape == blocks.shape[:3]
        if scales is None or not fits:
            shapes = ", ".join(f"{last} {x.dtype} {list(x.shape)}" for last, x in own.items())
            raise CheckpointError(
                f"{self.entries[name].file}: {name}: expected uint8 blocks [E, out, in / 32, 16] "
                f"and scales [E, out, in / 32], got {shapes}"
            )
        found = np.empty((*blocks.shape[:2], blocks.shape[2] * 32), np.float32)
        for expert, x in enumerate(blocks):  # one by one: what they take beside the result is small
            values = FP4[np.stack([x & 15, x >> 4], axis=-1)].reshape(*x.shape[:2], 32)
            exponent = scales[expert].astype(np.int32)[..., None] - 127
            found[expert] = np.ldexp(values, exponent).reshape(x.shape[0], -1)
        return found.swapaxes(1, 2)

    def release(self, name: str) -> None:
        """Takes the tensor's pages out of this process."""
        for full in self._parts.get(name, {"": name}).values():
            self._checkpoint.release(full)

    def close(self) -> None:
        self._checkpoint.close()

    def __enter__(self) -> Dequantised:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _lasts(self) -> tuple[str, ...]:
        return {
            "scaled": ("weight", *SCALE_NAMES),
            "packed": ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point"),
            "gptq": ("qweight", "qzeros", "scales", "g_idx"),
            "awq": ("qweight", "qzeros", "scales"),
            "mxfp4": ("blocks", "scales"),
        }[self._how.kind]

    def _is_quantised(self, name: str) -> bool:
        if self._how.kind != "scaled":
            return True
        module = name.removesuffix(".weight")
        return any(f"{module}.{scale}" in self._checkpoint.entries for scale in SCALE_NAMES)

    def _shape(self, own: Mapping[str, str]) -> tuple[int, ...]:
        shape = self._checkpoint.entries[own[STORED[self._how.kind]]].shape
        if self._how.kind == "mxfp4":
            return (shape[0], math.prod(shape[2:]) * 2, shape[1]) if len(shape) == 4 else shape
        if self._how.kind == "scaled" or len(shape) != 2:
            return shape
        per_word = 32 // self._how.bits
        if self._how.kind == "gptq":
            return shape[1], shape[0] * per_word
        if self._how.kind == "awq":
            return shape[1] * per_word, shape[0]
        if "weight_shape" in own:
            given = self._checkpoint.read(own["weight_shape"])
            if given.dtype.kind != "i" or given.shape != (2,) or given.min() < 1:
                raise CheckpointError(
                    f"{self.directory}: {own['weight_shape']}: expected two whole numbers from 1 "
                    f"on, got {given.dtype} {list(given.shape)}"
                )
            return tuple(given.tolist())
        return shape[0], shape[1] * per_word


Parts = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True, slots=True)
class _Stored:
    """Holds a weight [F, D] as values of few bits with scales [F, G] of G groups of columns, and
    maybe zero points like those. block: columns of a group; group_D: which group each column is in,
    if they are in no order.
    """

    values: npt.NDArray[Any]
    scales: npt.NDArray[Any]
    zeros: npt.NDArray[np.int32] | None = None
    block: int = 0
    group_D: npt.NDArray[np.int64] | None = None

    def check(self) -> None:
        """Raises: ValueError, IndexError if they do not fit together."""
        shape = self.scales.shape
        if self.zeros is not None and self.zeros.shape != shape:
            raise ValueError(f"expected as many zero points as scales, {list(shape)}")
        size, count = self.values.shape[1], shape[1]
        if self.group_D is not None:
            if (
                len(self.group_D) != size
                or not 0 <= self.group_D.min() <= self.group_D.max() < count
            ):
                raise ValueError("expected a group for each column")
        elif count != 1 and (not self.block or -(-size // self.block) != count):
            raise ValueError(f"expected blocks of {self.block} along {size}, got {count}")

    def weight(self) -> npt.NDArray[np.float32]:
        """Computes the weight."""
        values = self.values.astype(np.float32)
        if self.zeros is not None:
            values -= self._by_columns(self.zeros.astype(np.float32))
        return values * self._by_columns(self.scales.astype(np.float32))

    def _by_columns(self, x_FG: npt.NDArray[Any]) -> npt.NDArray[Any]:
        if self.group_D is not None:
            return x_FG[:, self.group_D]
        if x_FG.shape[1] == 1:
            return x_FG
        return np.repeat(x_FG, self.block, axis=1)[:, : self.values.shape[1]]

    def packed(self, packing: Packing, part: Part | None) -> dict[str, npt.NDArray[Any]]:
        """Returns its arrays as `packing` has them."""

        def rows(x: npt.NDArray[Any]) -> npt.NDArray[Any]:
            return x if part is None else part.take(x)

        values, scales = rows(self.values), rows(self.scales.astype(packing.scales))
        group = packing.group or values.shape[1]
        found = {"": values.reshape(len(values), -1, group).swapaxes(0, 1), SCALES: scales.T}
        if packing.has_zeros and self.zeros is not None:
            found[ZEROS] = rows(self.zeros.astype(np.int8)).T
        return found


def _scaled(own: Parts, how: Quantisation) -> _Stored:
    """Each block has a scale: one of all, one of each row, or one of each tile."""
    values = own["weight"]
    scale = np.atleast_2d(own[next(last for last in SCALE_NAMES if last in own)])
    return _Stored(values, _by_rows(scale, values, how), block=how.block[1])


def _packed(own: Parts, how: Quantisation) -> _Stored:
    middle = 2 ** (how.bits - 1)
    values = _unpacked(own["weight_packed"], how.bits)
    if "weight_shape" in own:
        values = values[:, : int(own["weight_shape"][1])]
    values, zeros = values - middle, None
    if "weight_zero_point" in own:
        # Packed along the rows.
        points = _unpacked(own["weight_zero_point"].T, how.bits).T
        zeros = _by_rows(points[: len(values)] - middle, values, how)
    scales = _by_rows(own["weight_scale"], values, how)
    return _Stored(_small(values, how.bits), scales, zeros, how.block[1])


def _gptq(own: Parts, how: Quantisation) -> _Stored:
    middle = 2 ** (how.bits - 1)
    values = _unpacked(own["qweight"].T, how.bits) - middle  # [out, in]
    zeros = _unpacked(own["qzeros"], how.bits).T + (how.zero_offset - middle)  # [out, groups]
    group_D = own["g_idx"].astype(np.int64) if "g_idx" in own else None
    small = _small(values, how.bits)
    return _Stored(small, own["scales"].T, zeros, how.block[1], group_D)


def _awq(own: Parts, how: Quantisation) -> _Stored:
    middle = 2 ** (how.bits - 1)
    values, zeros = (
        _unpacked(own[last], how.bits).reshape(len(own[last]), -1, 8)[..., AWQ_ORDER]
        for last in ("qweight", "qzeros")
    )
    values, zeros = (x.reshape(len(x), -1).T - middle for x in (values, zeros))
    return _Stored(_small(values, how.bits), own["scales"].T, zeros, how.block[1])


def _small(values: npt.NDArray[np.int32], bits: int) -> npt.NDArray[Any]:
    return values.astype(np.int8).astype(INT4) if bits == 4 else values.astype(np.int8)


def _unpacked(words: npt.NDArray[Any], bits: int) -> npt.NDArray[Any]:
    """Takes the values out of words, [R, C] int32 -> [R, C * 32 / bits] int32."""
    if words.ndim != 2 or words.dtype != np.int32:
        raise ValueError(f"expected a matrix of int32, got {words.dtype}")
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    fields = np.ascontiguousarray(words).view(np.uint32)[..., None]
    values = (fields >> shifts) & np.uint32(2**bits - 1)
    return values.reshape(len(words), -1).astype(np.int32)


def _by_rows(
    of_blocks: npt.NDArray[Any], values: npt.NDArray[Any], how: Quantisation
) -> npt.NDArray[Any]:
    """Repeats the figures of blocks of rows to all rows, of which the last block may have fewer."""
    size, block, count = len(values), how.block[0], len(of_blocks)
    if count == size:
        return of_blocks
    if count == 1:
        return np.repeat(of_blocks, size, axis=0)
    if not block or -(-size // block) != count:
        raise ValueError(f"expected blocks of {block} along {size}, got {count}")
    return np.repeat(of_blocks, block, axis=0)[:size]
