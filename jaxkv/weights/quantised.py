"""Reads quantised checkpoints: each weight is computed from what is stored when it is asked for.

Values are little-endian in their int32, the first in the lowest bits. Sources: the formats as the
libraries that write them define them, github.com/AutoGPTQ/AutoGPTQ (gptq), casper-hansen/AutoAWQ
(awq), vllm-project/compressed-tensors, and for blocks of fp8 arXiv 2412.19437, section 3.3.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxkv.errors import CheckpointError
from jaxkv.models.quantisation import Quantisation
from jaxkv.weights.safetensors import Checkpoint, TensorEntry

FLOAT32 = np.dtype(np.float32)
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""At which place in its int32 each of eight neighbours is."""

STORED = {"scaled": "weight", "packed": "weight_packed", "gptq": "qweight", "awq": "qweight"}
SCALES = ("weight_scale_inv", "weight_scale")
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
        stored = f".{STORED[how.kind]}"
        for name in checkpoint.entries:
            if name.endswith(stored) and self._is_quantised(name):
                module = name.removesuffix(stored)
                own = {
                    last: f"{module}.{last}"
                    for last in self._lasts
                    if f"{module}.{last}" in checkpoint.entries
                }
                self._parts[f"{module}.weight"] = own
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
        own = {last: self._checkpoint.read(full) for last, full in self._parts[name].items()}
        try:
            compute = {"scaled": _scaled, "packed": _packed, "gptq": _gptq, "awq": _awq}
            found = compute[self._how.kind](own, self._how)
            if found.shape != self.entries[name].shape:
                raise ValueError(f"they make {list(found.shape)}")
        except (KeyError, ValueError, IndexError) as error:
            shapes = ", ".join(f"{last} {list(x.shape)}" for last, x in own.items())
            raise CheckpointError(
                f"{self.entries[name].file}: {name}: expected the parts of a weight by "
                f"{self._how.method}, got {shapes} ({error})"
            ) from error
        return found

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
            "scaled": ("weight", *SCALES),
            "packed": ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point"),
            "gptq": ("qweight", "qzeros", "scales", "g_idx"),
            "awq": ("qweight", "qzeros", "scales"),
        }[self._how.kind]

    def _is_quantised(self, name: str) -> bool:
        if self._how.kind != "scaled":
            return True
        module = name.removesuffix(".weight")
        return any(f"{module}.{scale}" in self._checkpoint.entries for scale in SCALES)

    def _shape(self, own: Mapping[str, str]) -> tuple[int, ...]:
        shape = self._checkpoint.entries[own[STORED[self._how.kind]]].shape
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


def _scaled(own: Parts, how: Quantisation) -> npt.NDArray[Any]:
    """Multiplies each block with its scale: one of all, one of each row, or one of each tile."""
    weight = own["weight"].astype(np.float32)
    scale = own[next(last for last in SCALES if last in own)].astype(np.float32)
    return weight * _by_blocks(np.atleast_2d(scale), weight.shape, how)


def _packed(own: Parts, how: Quantisation) -> npt.NDArray[Any]:
    values = _unpacked(own["weight_packed"], how.bits)
    if "weight_shape" in own:
        values = values[:, : int(own["weight_shape"][1])]
    zero: Any = float(2 ** (how.bits - 1))
    if "weight_zero_point" in own:
        # Packed along the rows.
        points = _unpacked(own["weight_zero_point"].T, how.bits).T
        zero = _by_blocks(points[: len(values)].astype(np.float32), values.shape, how)
    scale = own["weight_scale"].astype(np.float32)
    return (values.astype(np.float32) - zero) * _by_blocks(scale, values.shape, how)


def _gptq(own: Parts, how: Quantisation) -> npt.NDArray[Any]:
    values = _unpacked(own["qweight"].T, how.bits)  # [out, in]
    scale = own["scales"].astype(np.float32).T  # [out, groups]
    zero = _unpacked(own["qzeros"], how.bits).T.astype(np.float32) + how.zero_offset
    if zero.shape != scale.shape:
        raise ValueError(f"expected as many zero points as scales, {list(scale.shape)}")
    if "g_idx" in own:
        group = own["g_idx"].astype(np.int64)
        if len(group) != values.shape[1] or group.min() < 0:
            raise ValueError("expected a group for each column")
        return (values - zero[:, group]) * scale[:, group]
    zero, scale = (_by_blocks(x, values.shape, how) for x in (zero, scale))
    return (values - zero) * scale


def _awq(own: Parts, how: Quantisation) -> npt.NDArray[Any]:
    values, zero = (
        _unpacked(own[last], how.bits).reshape(len(own[last]), -1, 8)[..., AWQ_ORDER]
        for last in ("qweight", "qzeros")
    )
    values, zero = (x.reshape(len(x), -1).T.astype(np.float32) for x in (values, zero))
    scale = own["scales"].astype(np.float32).T
    if zero.shape != scale.shape:
        raise ValueError(f"expected as many zero points as scales, {list(scale.shape)}")
    return (values - _by_blocks(zero, values.shape, how)) * _by_blocks(scale, values.shape, how)


def _unpacked(words: npt.NDArray[Any], bits: int) -> npt.NDArray[Any]:
    """Takes the values out of words, [R, C] int32 -> [R, C * 32 / bits] int32."""
    if words.ndim != 2 or words.dtype != np.int32:
        raise ValueError(f"expected a matrix of int32, got {words.dtype}")
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    fields = np.ascontiguousarray(words).view(np.uint32)[..., None]
    values = (fields >> shifts) & np.uint32(2**bits - 1)
    return values.reshape(len(words), -1).astype(np.int32)


def _by_blocks(
    of_blocks: npt.NDArray[Any], shape: tuple[int, ...], how: Quantisation
) -> npt.NDArray[Any]:
    """Repeats the figures of blocks to all values of a matrix of this shape, whose last blocks may
    be cut off; along an axis of which there is one for all, or one for each, they stay as they are.
    """
    for axis, (size, block) in enumerate(zip(shape, how.block, strict=True)):
        count = of_blocks.shape[axis]
        if count not in (1, size):
            if not block or -(-size // block) != count:
                raise ValueError(f"expected blocks of {block} along {size}, got {count}")
            of_blocks = np.repeat(of_blocks, block, axis=axis)
            of_blocks = of_blocks[:size] if axis == 0 else of_blocks[:, :size]
    return of_blocks
