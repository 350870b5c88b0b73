"""Defines the formats of quantised weights: what their tensors are called, and which values, scales
and zero points these stand for.

Values are little-endian in their int32, the first in the lowest bits. Sources: the formats as the
libraries that write them define them, github.com/AutoGPTQ/AutoGPTQ (gptq), casper-hansen/AutoAWQ
(awq), vllm-project/compressed-tensors, NVIDIA/Model-Optimizer (modelopt), bitsandbytes-foundation/
bitsandbytes; for blocks of fp8 arXiv 2412.19437, section 3.3; for E2M1 and E8M0 the OCP
Microscaling Formats (MX) 1.0, section 5.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from jaxkv.config import is_int
from jaxkv.models.families.base import Leaf, Part
from jaxkv.models.quantisation import Quantisation
from jaxkv.weights.packing import (
    BFLOAT16,
    FACTOR,
    FLOAT32,
    INT4,
    LEAST_GROUP,
    SCALES,
    TABLE,
    ZEROS,
    Packing,
    from_pairs,
)

Parts = Mapping[str, npt.NDArray[Any]]
"""The stored tensors of a weight, by what `Form.parts` calls them."""

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""At which place in its int32 each of eight neighbours is."""

FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
FP4 = np.concatenate([FP4, -FP4])
"""What 4 bits of E2M1 mean."""

E8M0, E4M3 = np.dtype(ml_dtypes.float8_e8m0fnu), np.dtype(ml_dtypes.float8_e4m3fn)

KEPT = (FLOAT32, BFLOAT16, np.dtype(np.float16), E8M0, E4M3)
"""What scales may stay; others become float32."""

EXPECTED: dict[str, np.dtype[Any]] = {
    "gptq": np.dtype(np.float16),
    "awq": np.dtype(np.float16),
    "scaled": FLOAT32,
    "mxfp4": E8M0,
    "fp4": E4M3,
    "modelopt": E4M3,
    "pairs": E8M0,
}
"""Of which dtype scales mostly are, by `Quantisation.kind`; others are of the model's."""


@dataclass(frozen=True, slots=True)
class Stored:
    """Holds a weight [F, D] as values of few bits, or pairs of 4 bits in uint8 [F, D / 2], with
    scales [F, G] of G groups of columns, and maybe zero points like those. block: columns of a
    group; group_D: which group each column is in, if they are in no order. table: values are 4 bits
    that stand for its 16 numbers. factor: of the whole weight, beside the scales.
    """

    values: npt.NDArray[Any]
    scales: npt.NDArray[Any]
    zeros: npt.NDArray[np.int32] | None = None
    block: int = 0
    group_D: npt.NDArray[np.int64] | None = None
    table: npt.NDArray[np.float32] | None = None
    factor: npt.NDArray[np.float32] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        *rows, columns = self.values.shape
        return (*rows, 2 * columns if self.values.dtype == np.uint8 else columns)

    def check(self) -> None:
        """Raises: ValueError, IndexError if they do not fit together."""
        shape = self.scales.shape
        if self.values.ndim != 2 or self.scales.ndim != 2 or shape[0] != len(self.values):
            raise ValueError(f"expected a matrix and scales of its {len(self.values)} rows")
        if self.scales.dtype.kind in "biu":  # such as bitsandbytes', which stand for others
            raise ValueError(f"expected scales of floats, got {self.scales.dtype}")
        if self.zeros is not None and self.zeros.shape != shape:
            raise ValueError(f"expected as many zero points as scales, {list(shape)}")
        size, count = self.shape[1], shape[1]
        if self.group_D is not None:
            is_one = self.group_D.shape == (size,) and size > 0
            if not is_one or not 0 <= self.group_D.min() <= self.group_D.max() < count:
                raise ValueError("expected a group for each column")
        elif count != 1 and (not self.block or -(-size // self.block) != count):
            raise ValueError(f"expected blocks of {self.block} along {size}, got {count}")
        if self.table is not None and self.table.shape != (16,):
            raise ValueError(f"expected a table of 16 numbers, got {list(self.table.shape)}")

    @np.errstate(
        over="ignore", invalid="ignore"
    )  # what is not finite is named when it is looked at
    def weight(self) -> npt.NDArray[np.float32]:
        """Computes the weight."""
        values = from_pairs(self.values) if self.values.dtype == np.uint8 else self.values
        if self.table is None:
            values = values.astype(np.float32)
        else:
            values = self.table[values.view(np.uint8) & 15]
        if self.zeros is not None:
            values -= self._by_columns(self.zeros.astype(np.float32))
        values *= self._by_columns(self.scales.astype(np.float32))
        return values if self.factor is None else values * self.factor

    def _by_columns(self, x_FG: npt.NDArray[Any]) -> npt.NDArray[Any]:
        if self.group_D is not None:
            return x_FG[:, self.group_D]
        if x_FG.shape[1] == 1:
            return x_FG
        return np.repeat(x_FG, self.block, axis=1)[:, : self.shape[1]]

    @np.errstate(over="ignore", invalid="ignore")
    def packed(self, packing: Packing, part: Part | None) -> dict[str, npt.NDArray[Any]]:
        """Returns its arrays, or those of a part of its rows, as `packing` has them."""

        def rows(x: npt.NDArray[Any]) -> npt.NDArray[Any]:
            return x if part is None else part.of_rows(x)

        def of_groups(x_FG: npt.NDArray[Any]) -> npt.NDArray[Any]:
            # A group that several devices have parts of has become several ones.
            return np.repeat(rows(x_FG), num_groups // x_FG.shape[1], axis=1).T

        num_groups = self.shape[1] // packing.group if packing.group else 1
        values = rows(self.values)
        found = {"": values.reshape(len(values), num_groups, -1).swapaxes(0, 1)}
        found[SCALES] = of_groups(self.scales.astype(packing.scales))
        if packing.has_zeros and self.zeros is not None:
            found[ZEROS] = of_groups(self.zeros.astype(np.int8))
        if self.table is not None:
            found[TABLE] = self.table
        if self.factor is not None:
            found[FACTOR] = np.asarray(self.factor)
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """Says what the tensors of a quantised weight are called, and how it is computed of them.

    parts: for each part, what its name has in place of `whole` at the end of the weight's; the
    first has the values. marks: parts of which one shows that a weight is quantised, where its
    values are called as the weight is. shape: of the weight. scales: parts of which one has the
    scales, with groups on `group_axis`; none where they have to be computed. is_turned: a matrix is
    computed as [out, in] of a weight that stands for [in, out].
    """

    parts: Mapping[str, str]
    shape: Callable[[Parts, Quantisation], tuple[int, ...]]
    compute: Callable[[Parts, Quantisation], Stored]
    whole: str = ".weight"
    marks: tuple[str, ...] = ()
    scales: tuple[str, ...] = ()
    group_axis: int = -1
    factors: tuple[str, ...] = ()
    has_table: bool = False
    is_turned: bool = False

    @property
    def values(self) -> str:
        return next(iter(self.parts))

    def matrices(self, own: Parts, how: Quantisation, part: Part | None) -> Iterator[Stored]:
        """Computes the matrices that a weight is made of, that of each expert or one: as they are
        stored, or as the model multiplies with `part` of them.

        Raises: KeyError, ValueError, IndexError if its parts do not fit together.
        """
        shape = self.shape(own, how)
        own = self._with_two_axes(own, shape)
        is_turned = self.is_turned or (part is not None and part.transposed)
        if is_turned and not self.is_turned:
            own = {last: x.swapaxes(-1, -2) if x.ndim > 1 else x for last, x in own.items()}
            how = replace(how, block=how.block[::-1])
        of_one = shape[:-3:-1] if is_turned else shape[-2:]
        if len(shape) == 3 and any(x.shape[:1] != shape[:1] for x in own.values()):
            raise ValueError(f"expected parts of {shape[0]} experts each")
        for expert in range(shape[0]) if len(shape) == 3 else (...,):
            found = self.compute({last: x[expert] for last, x in own.items()}, how)
            found.check()
            if found.shape != of_one:
                raise ValueError(f"they make {list(found.shape)}")
            yield found

    def packing(
        self, own: Parts, how: Quantisation, part: Part | None, num_parts: int, dtype: str
    ) -> Packing | None:
        """Returns what the weight can be kept in; None where it cannot, or its parts are not those
        of a weight. num_parts: into how many its columns are divided. dtype: the model's.
        """
        shape = self.shape(own, how)
        own = self._with_two_axes(own, shape)
        is_turned = part is not None and part.transposed
        if (self.is_turned and not is_turned) or len(shape) < 2:
            return None
        width, block, axis = shape[-1], how.block[1], self.group_axis
        if is_turned:
            width = shape[-2]
        if is_turned and not self.is_turned:
            block, axis = how.block[0], axis - 1
        scales, kind = next((own[last] for last in self.scales if last in own), None), FLOAT32
        if scales is not None:
            num_groups = scales.shape[axis] if scales.ndim == len(shape) else 1
            kind = _scales(scales).dtype
        elif not self.scales and width % block == 0:
            num_groups, kind = width // block, BFLOAT16 if dtype == "bfloat16" else FLOAT32
        else:
            return None
        group = block if num_groups > 1 else 0
        if "g_idx" in own and not np.array_equal(
            own["g_idx"], np.arange(width) // (group or width)
        ):
            return None  # columns of a group are not neighbours
        if group and width != group * num_groups:
            return None
        values = own[self.values].dtype
        if how.kind != "scaled":
            values = INT4 if how.bits == 4 else np.dtype(np.int8)
        packing = Packing(
            values,
            group,
            kind if kind in KEPT else FLOAT32,
            has_zeros=not own.keys().isdisjoint(("qzeros", "weight_zero_point")),
            has_table=self.has_table,
            has_factor=not own.keys().isdisjoint(self.factors),
        )
        return _divided(packing, width, num_parts)

    def _with_two_axes(self, own: Parts, shape: tuple[int, ...]) -> Parts:
        """Returns the parts, scales of rows that are stored as [out] as [out, 1], and those of
        blocks that modelopt stores as [out, 1, in, 1] without the axes between.
        """

        def matrix(x: npt.NDArray[Any]) -> npt.NDArray[Any]:
            if x.shape == shape[:-1]:
                return x[..., None]
            is_of_modelopt = x.ndim == len(shape) + 2 and x.shape[-3::2] == (1, 1)
            return x[..., 0, :, 0] if is_of_modelopt else x

        return {last: matrix(x) if last in self.scales else x for last, x in own.items()}


def _divided(packing: Packing, width: int, num_parts: int) -> Packing | None:
    """Returns the packing whose groups divide each of so many parts of `width` columns, None where
    there is no use in one.
    """
    group = math.gcd(packing.group, width // num_parts) if packing.group else 0
    is_odd = packing.dtype == INT4 and (group or width // num_parts) % 2
    return None if 0 < group < LEAST_GROUP or is_odd else replace(packing, group=group)


def expected_packing(
    leaf: Leaf, how: Quantisation, *, num_parts: int, dtype: str
) -> Packing | None:
    """Returns what a matrix is kept in if the checkpoint is what its config says; None where it is
    not quantised, or cannot be kept. For planning without the checkpoint, which may have scales of
    other dtypes.
    """
    how = how.of(leaf.source)
    form, width = FORMS[how.kind], leaf.info.shape[-1]
    is_turned = leaf.part is not None and leaf.part.transposed
    names = dict.fromkeys(("layer", "pair", "half", "head", "expert"), 0)
    module = leaf.source.format(**names).removesuffix(".weight")
    if how.skips(module) or (form.is_turned and not is_turned):
        return None
    group = how.block[0] if is_turned and not form.is_turned else how.block[1]
    group = 0 if group >= width else group
    if group and width % group:
        return None
    model = BFLOAT16 if dtype == "bfloat16" else FLOAT32
    values: np.dtype[Any] = INT4 if how.bits == 4 else np.dtype(np.int8)
    scales: np.dtype[Any] = EXPECTED.get(how.kind, model)
    if how.kind == "scaled":
        values = np.dtype(np.int8) if "int-" in how.method else E4M3
    if form.factors and how.block[1] == 32:
        scales = E8M0
    packing = Packing(
        values,
        group,
        scales,
        has_zeros=how.kind == "awq" or how.has_zeros,
        has_table=form.has_table,
        has_factor=bool(form.factors) and scales != E8M0,
    )
    return _divided(packing, width, num_parts)


def _scaled(own: Parts, how: Quantisation) -> Stored:
    """Each block has a scale: one of all, one of each row, or one of each tile."""
    values = own["weight"]
    scale = np.atleast_2d(_scales(own[next(last for last in SCALED.marks if last in own)]))
    return Stored(values, _by_rows(scale, values.shape, how), block=how.block[1])


def _packed(own: Parts, how: Quantisation) -> Stored:
    values, zeros = _centred(own["weight_packed"], how.bits), None
    shape = _packed_shape(own, how)
    if "weight_shape" in own:
        values = _cut(values, shape[1])
    if "weight_zero_point" in own:
        # Packed along the rows.
        points = _unpacked(own["weight_zero_point"].T, how.bits).T
        zeros = _by_rows(points[: len(values)] - 2 ** (how.bits - 1), shape, how)
    elif how.has_zeros:
        raise ValueError("expected weight_zero_point, since config.json says symmetric=false")
    return Stored(values, _by_rows(own["weight_scale"], shape, how), zeros, how.block[1])


def _gptq(own: Parts, how: Quantisation) -> Stored:
    values, points = _centred(own["qweight"].T, how.bits), own["qzeros"]  # [out, in]
    if how.takes_one:
        # From whole words, as GPTQModel writes them: with borrows, where a zero point is 0.
        ones = np.uint32(sum(1 << shift for shift in range(0, 32, how.bits)))
        points = (points.view(np.uint32) + ones).view(points.dtype)
    zeros = _unpacked(points, how.bits).T - 2 ** (how.bits - 1)  # [out, groups]
    group_D = own["g_idx"].astype(np.int64) if "g_idx" in own else None
    if group_D is None and how.is_ordered and len(own["scales"]) > 1:
        raise ValueError("expected g_idx, since config.json says desc_act")
    return Stored(values, own["scales"].T, zeros, how.block[1], group_D)


def _awq(own: Parts, how: Quantisation) -> Stored:
    zeros = _unpacked(own["qzeros"], how.bits).reshape(len(own["qzeros"]), -1, 8)[..., AWQ_ORDER]
    zeros = zeros.reshape(len(zeros), -1).T - 2 ** (how.bits - 1)
    return Stored(_across(own["qweight"]), own["scales"].T, zeros, how.block[1])


def _mxfp4(own: Parts, how: Quantisation) -> Stored:
    """Blocks [out, in / 32, 16] hold pairs of values, each block of 32 has a power of two."""
    blocks = own["blocks"]
    if blocks.ndim != 3 or blocks.shape[-1] != 16:
        raise ValueError("expected blocks [E, out, in / 32, 16]")
    packed = blocks.reshape(len(blocks), -1)
    return _fp4({"weight_packed": packed, "weight_scale": own["scales"]}, how)


def _fp4(own: Parts, how: Quantisation) -> Stored:
    """Pairs of E2M1 [out, in / 2], scales of groups, and maybe one of all: what scales are divided
    by (compressed-tensors), or multiplied with (modelopt).
    """
    scale = "weight_scale_inv" if "weight_scale_inv" in own else "weight_scale"
    packed, scales = _pairs(own), _scales(own[scale])
    expected = E8M0 if how.block[1] == 32 else E4M3
    if packed.dtype != np.uint8 or scales.dtype != expected:
        raise ValueError(f"expected pairs of 4 bits in uint8, and scales in {expected}")
    if (count := scales.shape[-1]) != (groups := -(-2 * packed.shape[-1] // how.block[1])):
        raise ValueError(f"expected scales of {groups} groups of {how.block[1]}, got {count}")
    if "weight_scale_2" in own:
        factor = own["weight_scale_2"].astype(np.float32)
    elif expected == E4M3:
        with np.errstate(divide="ignore"):  # what is not finite is named when it is looked at
            factor = np.float32(1) / own["weight_global_scale"].astype(np.float32)
    else:
        factor = None
    factor = None if factor is None else factor.reshape(())
    return Stored(packed, scales, block=how.block[1], table=FP4, factor=factor)


def _scales(stored: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Returns scales, which are powers of two where they are stored as bytes."""
    return stored.view(E8M0) if stored.dtype == np.uint8 else stored


def _pairs(own: Parts) -> npt.NDArray[Any]:
    pairs = own["weight_packed"] if "weight_packed" in own else own["weight"]
    return pairs.view(np.uint8) if pairs.dtype == np.int8 else pairs


def _bitsandbytes(own: Parts, how: Quantisation) -> Stored:
    """Pairs of 4 bits, the first in the upper half, in blocks over all rows; what a block is
    multiplied with may be quantised too, to 8 bits that stand for the numbers of a table.
    """
    shape, block = _bitsandbytes_shape(own, how), how.block[1]
    pairs: npt.NDArray[Any] = np.ascontiguousarray(own["weight"]).reshape(-1).view(np.uint8)
    largest: npt.NDArray[Any] = own["absmax"]
    state = _quant_state(own)
    if "nested_blocksize" in state:
        size, offset = state["nested_blocksize"], state["nested_offset"]
        if not is_int(size) or not 0 < size < 2**31 or not isinstance(offset, float | int):
            raise ValueError("expected nested_blocksize and nested_offset in quant_state")
        nested, block_N = own["nested_absmax"].astype(np.float32), np.arange(largest.size) // size
        largest = own["nested_quant_map"].astype(np.float32)[largest] * nested[block_N]
        largest += np.float32(offset)
    if pairs.size * 2 != math.prod(shape) or largest.shape != (-(-pairs.size * 2 // block),):
        raise ValueError(f"expected {list(shape)} values in blocks of {block}")
    pairs, table = (pairs >> 4) + (pairs << 4), own["quant_map"].astype(np.float32)
    if shape[1] % block:  # a block may have columns of two rows
        values = from_pairs(pairs).reshape(shape)
        scales = np.repeat(largest, block)[: values.size].reshape(shape)
        return Stored(values, scales, block=1, table=table)
    return Stored(
        pairs.reshape(shape[0], -1), largest.reshape(shape[0], -1), block=block, table=table
    )


def _bytes_of(words: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """Returns the bytes of words, [R, C] int32 -> [R, C * 4]. Raises: ValueError for others."""
    if words.ndim != 2 or words.dtype != np.int32:
        raise ValueError(f"expected a matrix of int32, got {words.dtype}")
    return np.ascontiguousarray(words).view(np.uint8)


def _centred(words: npt.NDArray[Any], bits: int) -> npt.NDArray[Any]:
    """Takes the values out of words, less the middle of their range: those of 8 bits as int8, those
    of 4 bits in pairs. Only the highest bit of each is another one then.

    As int32 first they would take eight times the words.
    """
    found = _bytes_of(words) ^ np.uint8(0x88 if bits == 4 else 0x80)
    return found if bits == 4 else found.view(np.int8)


def _cut(values: npt.NDArray[Any], width: int) -> npt.NDArray[Any]:
    """Returns the first columns of what `_centred` gives."""
    if values.dtype != np.uint8:
        return values[:, :width]
    return from_pairs(values)[:, :width] if width % 2 else values[:, : width // 2]


def _across(words: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Takes AWQ's values of 4 bits out of words, [in, out / 8] int32, as `_centred` does, with
    those of neighbouring words of a column in pairs: [out, in / 2].
    """
    stored = _bytes_of(words) ^ np.uint8(0x88)
    num_rows, num_words = words.shape
    stored = np.pad(stored, ((0, num_rows % 2), (0, 0)))
    first, second = (stored[start::2].reshape(-1, num_words, 4) for start in (0, 1))
    found = np.empty((num_words, 8, len(first)), np.uint8)
    for place in range(8):
        a, b = first[..., place // 2], second[..., place // 2]
        pairs = a >> 4 | b & 240 if place % 2 else a & 15 | b << 4
        found[:, AWQ_ORDER.index(place)] = pairs.T
    return _cut(found.reshape(8 * num_words, -1), num_rows)


def _unpacked(words: npt.NDArray[Any], bits: int) -> npt.NDArray[Any]:
    """Takes the values out of words, [R, C] int32 -> [R, C * 32 / bits] int32."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    fields = _bytes_of(words).view(np.uint32)[..., None]
    values = (fields >> shifts) & np.uint32(2**bits - 1)
    return values.reshape(len(words), -1).astype(np.int32)


def _by_rows(
    of_blocks: npt.NDArray[Any], shape: tuple[int, ...], how: Quantisation
) -> npt.NDArray[Any]:
    """Repeats the figures of blocks of rows to all rows, of which the last block may have fewer."""
    if of_blocks.ndim == 0:
        raise ValueError("expected figures of blocks, got one number")
    if len(of_blocks) == shape[0]:
        return of_blocks
    if of_blocks.size == 1:
        return np.repeat(of_blocks, shape[0], axis=0)
    for size, block, count in zip(shape, how.block, of_blocks.shape, strict=True):
        if -(-size // (block or size)) != count:
            raise ValueError(f"expected blocks of {block or size} along {size}, got {count}")
    return np.repeat(of_blocks, how.block[0] or shape[0], axis=0)[: shape[0]]


def _quant_state(own: Parts) -> dict[str, Any]:
    stored = next(own[last] for last in BITSANDBYTES.marks if last in own)
    try:
        state: Any = json.loads(stored.tobytes())
    except RecursionError as error:
        raise ValueError(f"quant_state: {error}") from error
    if not isinstance(state, dict):
        raise ValueError("expected quant_state to be an object")
    return state


def _bitsandbytes_shape(own: Parts, how: Quantisation) -> tuple[int, ...]:
    state = _quant_state(own)
    shape, block = state.get("shape"), state.get("blocksize")
    if (
        not isinstance(shape, list)
        or len(shape) != 2
        or not all(is_int(n) and n > 0 for n in shape)
    ):
        raise ValueError(
            f"quant_state: expected a shape of two whole numbers from 1 on, got {shape}"
        )
    if block != how.block[1]:
        raise ValueError(f"quant_state: expected blocksize {how.block[1]}, got {block}")
    return tuple(shape)


def _as_stored(own: Parts, how: Quantisation) -> tuple[int, ...]:
    return own["weight"].shape


def _packed_shape(own: Parts, how: Quantisation) -> tuple[int, ...]:
    shape = own["weight_packed"].shape
    if "weight_shape" not in own:
        return _of_words(shape, how)
    given = own["weight_shape"]
    if given.dtype.kind != "i" or given.shape != (2,) or given.min() < 1:
        raise ValueError(
            f"weight_shape: expected two whole numbers from 1 on, got {given.dtype} "
            f"{list(given.shape)}"
        )
    return tuple(given.tolist())


def _of_words(shape: tuple[int, ...], how: Quantisation) -> tuple[int, ...]:
    return (*shape[:-1], shape[-1] * 32 // how.bits) if shape else shape


def _gptq_shape(own: Parts, how: Quantisation) -> tuple[int, ...]:
    return _of_words(own["qweight"].shape[::-1], how)


def _awq_shape(own: Parts, how: Quantisation) -> tuple[int, ...]:
    return _of_words(own["qweight"].shape, how)[::-1]


def _mxfp4_shape(own: Parts, how: Quantisation) -> tuple[int, ...]:
    shape = own["blocks"].shape
    return (shape[0], math.prod(shape[2:]) * 2, shape[1]) if len(shape) == 4 else shape


def _pairs_shape(own: Parts, how: Quantisation) -> tuple[int, ...]:
    shape = _pairs(own).shape
    return (*shape[:-1], shape[-1] * 2) if shape else shape


def _named(prefix: str, *lasts: str) -> dict[str, str]:
    return {last: prefix + last for last in lasts}


SCALED = Form(
    parts={"weight": "", "weight_scale_inv": "_scale_inv", "weight_scale": "_scale"},
    whole="",
    marks=("weight_scale_inv", "weight_scale"),
    scales=("weight_scale_inv", "weight_scale"),
    shape=_as_stored,
    compute=_scaled,
)
BITSANDBYTES = Form(
    parts={"weight": ""}
    | _named(".", "absmax", "quant_map", "nested_absmax", "nested_quant_map")
    | {kind: f".quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4")},
    whole="",
    marks=("nf4", "fp4"),
    shape=_bitsandbytes_shape,
    compute=_bitsandbytes,
    has_table=True,
)
FORMS = {
    "scaled": SCALED,
    "packed": Form(
        parts=_named(".", "weight_packed", "weight_scale", "weight_shape", "weight_zero_point"),
        scales=("weight_scale",),
        shape=_packed_shape,
        compute=_packed,
    ),
    "gptq": Form(
        parts=_named(".", "qweight", "qzeros", "scales", "g_idx"),
        scales=("scales",),
        group_axis=0,
        shape=_gptq_shape,
        compute=_gptq,
    ),
    "awq": Form(
        parts=_named(".", "qweight", "qzeros", "scales"),
        scales=("scales",),
        group_axis=0,
        shape=_awq_shape,
        compute=_awq,
    ),
    "mxfp4": Form(
        parts=_named("_", "blocks", "scales"),
        whole="",
        scales=("scales",),
        shape=_mxfp4_shape,
        compute=_mxfp4,
        has_table=True,
        is_turned=True,
    ),
    "fp4": Form(
        parts=_named(".", "weight_packed", "weight_scale", "weight_global_scale"),
        scales=("weight_scale",),
        shape=_pairs_shape,
        compute=_fp4,
        factors=("weight_global_scale",),
        has_table=True,
    ),
    "pairs": Form(
        parts={"weight": "", "weight_scale_inv": "_scale_inv"},
        whole="",
        marks=("weight_scale_inv",),
        scales=("weight_scale_inv",),
        shape=_pairs_shape,
        compute=_fp4,
        has_table=True,
    ),
    "modelopt": Form(
        parts={"weight": "", "weight_scale": "_scale", "weight_scale_2": "_scale_2"},
        whole="",
        marks=("weight_scale", "weight_scale_2"),
        scales=("weight_scale",),
        shape=_pairs_shape,
        compute=_fp4,
        factors=("weight_scale_2",),
        has_table=True,
    ),
    "bitsandbytes": BITSANDBYTES,
}
"""By `Quantisation.kind`."""
