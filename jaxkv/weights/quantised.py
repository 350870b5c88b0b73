"""Reads quantised checkpoints: a weight stays packed in the form of `weights.packing` where that
can hold it, or is computed from what is stored when it is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxkv.errors import CheckpointError
from jaxkv.models.families.base import Part
from jaxkv.models.quantisation import MIXED, Quantisation, of_modelopt
from jaxkv.weights.formats import FORMS, Form, Parts, Stored
from jaxkv.weights.packing import FLOAT32, Packing
from jaxkv.weights.safetensors import Checkpoint, TensorEntry

OF_ACTIVATIONS = (
    *("input_scale", "input_scale_ub", "input_zero_point", "input_global_scale", "output_scale"),
    *("activation_scale", "q_scale", "k_scale", "v_scale", "kv_scale"),
)
NOT_WEIGHTS = tuple(f".{last}" for last in OF_ACTIVATIONS)
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
        for name in checkpoint.entries:
            if (own := self._parts_with(name)) is None:
                continue
            form = self._form(name)
            stem = name.removesuffix(form.parts[form.values])
            self._parts[stem + form.whole] = own
            used |= set(own.values())
            bias = f"{stem.removesuffix('.weight')}.bias"
            if bias in checkpoint.entries and bias not in known:
                used |= set() if checkpoint.read(bias).any() else {bias}
        entries = {name: entry for name, entry in checkpoint.entries.items() if name not in used}
        for name, own in self._parts.items():
            form = self._form(name)
            entry = checkpoint.entries[own[form.values]]
            try:
                shape = form.shape(self._own(name), self._how_of(name))
            except ValueError as error:
                raise CheckpointError(f"{entry.file}: {name}: {error}") from error
            nbytes = math.prod(shape) * FLOAT32.itemsize
            entries[name] = replace(entry, name=name, dtype=FLOAT32, shape=shape, nbytes=nbytes)
        self.entries: Mapping[str, TensorEntry] = entries

    def _parts_with(self, name: str) -> dict[str, str] | None:
        """Returns the names of a quantised weight's parts by what they are, None if the tensor of
        this name has no values of such a weight.
        """
        form = self._form(name)
        end = form.parts[form.values]
        if not name.endswith(end):
            return None
        stem = name.removesuffix(end)
        own = {last: stem + suffix for last, suffix in form.parts.items()}
        own = {last: full for last, full in own.items() if full in self._checkpoint.entries}
        return None if form.marks and own.keys().isdisjoint(form.marks) else own

    def read(self, name: str) -> npt.NDArray[Any]:
        """Reads or computes a tensor. Raises: CheckpointError if what it is made of does not fit
        together.
        """
        if name not in self._parts:
            return self._checkpoint.read(name)
        shape = self.entries[name].shape
        found = np.empty(shape, np.float32)
        matrices = self._matrices(name)
        for matrix, stored in zip(found.reshape(-1, *shape[-2:]), matrices, strict=True):
            matrix[...] = stored.weight().T if self._form(name).is_turned else stored.weight()
        return found

    def packing(
        self, names: Sequence[str], part: Part | None, num_parts: int, dtype: str
    ) -> Packing | None:
        """Returns what these weights, of layers of one kind, or that part of each, can all be kept
        in; None where they have to be computed. num_parts: into how many their columns are divided.
        dtype: the model's.
        """
        if not all(name in self._parts for name in names):
            return None
        found = {
            self._form(name).packing(self._own(name), self._how_of(name), part, num_parts, dtype)
            for name in names
        }
        return found.pop() if len(found) == 1 else None

    def packed(
        self, name: str, packing: Packing, part: Part | None
    ) -> Iterator[dict[str, npt.NDArray[Any]]]:
        """Gives the arrays of each matrix of a weight, or of a part of it, as it is kept: one, or
        that of each expert. Raises: as `read`.
        """
        if part is not None and part.of_all:
            part = part.of_one(self.entries[name].shape[0])
        for stored in self._matrices(name, part):
            yield stored.packed(packing, part)

    def _how_of(self, name: str) -> Quantisation:
        """Returns how a weight is stored, by its own tensors where modules differ."""
        if not self._how.mixed:
            return self._how.of(name)
        has_factor = f"{name}_scale_2" in self._checkpoint.entries
        # What reads scales of blocks reads one of all, and those of rows.
        return of_modelopt("NVFP4" if has_factor else "FP8_PB_WO", MIXED)

    def _form(self, name: str) -> Form:
        return FORMS[self._how_of(name).kind]

    def _own(self, name: str) -> Parts:
        return {last: self._checkpoint.read(full) for last, full in self._parts[name].items()}

    def _matrices(self, name: str, part: Part | None = None) -> Iterator[Stored]:
        """Raises: CheckpointError if what the weight is made of does not fit together."""
        own = self._own(name)
        try:
            yield from self._form(name).matrices(own, self._how_of(name), part)
        except (KeyError, ValueError, IndexError) as error:
            shapes = ", ".join(f"{last} {x.dtype} {list(x.shape)}" for last, x in own.items())
            raise CheckpointError(
                f"{self.entries[name].file}: {name}: expected the parts of a weight by "
                f"{self._how.method}, got {shapes} ({error})"
            ) from error

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
