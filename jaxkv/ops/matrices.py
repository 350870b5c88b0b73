"""Weights as matmuls read them: where they lie in a stack of layers and experts, and how they are
packed. Float32 results, the weights' dtype at the inputs of a matmul.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.axes import Array
from jaxkv.ops import native
from jaxkv.pytree import pytree, static

LANES = 128
"""Columns of a TPU's registers."""

Place = int | Array | tuple[int | Array, Array]
"""A layer's number in a stack, or those of a layer and its expert."""


def _of_stack(leaf: Array, layer: Place, starts: Sequence[Any], sizes: Sequence[int]) -> Array:
    """Returns a part of what a stack has for a layer or an expert. Not of a flattened stack: that
    would have a layout of its own, and all of the stack be copied to it.
    """
    at = layer if isinstance(layer, tuple) else (layer,)
    found = jax.lax.dynamic_slice(leaf, (*at, *starts), (*(1 for _ in at), *sizes))
    return jax.lax.squeeze(found, range(len(at)))


def _flattened(leaf: Array, layer: Place | None, axes: int = 2) -> tuple[Array, int | Array]:
    """Returns a stack with one axis for layers and experts before the last `axes`, and the number
    of the matrix in it.
    """
    number = 0 if layer is None else layer
    if isinstance(number, tuple):
        number = number[0] * leaf.shape[1] + number[1]
    return leaf.reshape(-1, *leaf.shape[-axes:]), number


def _expert_of(layer: Place | None, number: Array) -> Place:
    if layer is None or isinstance(layer, tuple):
        raise TypeError(f"expected the number of a layer, got {layer}")
    return layer, number


class Matrix(NamedTuple):
    """A weight [F, D]: a leaf of its own, or the matrix of one layer in a stacked leaf [L, F, D],
    of one of its experts in [L, E, F, D]. A uint16 leaf holds the bits of bfloat16 values
    (`config.bfloat16_as_bits`).
    """

    leaf: Array
    layer: Place | None = None

    @property
    def num_rows(self) -> int:
        return self.leaf.shape[-2]

    @property
    def num_columns(self) -> int:
        return self.leaf.shape[-1]

    @property
    def column_unit(self) -> int:
        """Returns a number of columns of which `dot_columns` may take any multiple."""
        return LANES

    @property
    def dtype(self) -> np.dtype:
        return jnp.dtype(jnp.bfloat16) if self.leaf.dtype == jnp.uint16 else self.leaf.dtype

    def of_expert(self, number: Array) -> Matrix:
        """Returns the matrix of an expert of this layer."""
        return Matrix(self.leaf, _expert_of(self.layer, number))

    def rows(self, start: int | Array, num_rows: int) -> Array:
        """Rows [start, start + num_rows) as values, [num_rows, D]."""
        if self.layer is None:
            return values(jax.lax.dynamic_slice_in_dim(self.leaf, start, num_rows))
        sizes = (num_rows, self.num_columns)
        return values(_of_stack(self.leaf, self.layer, (start, 0), sizes))

    def columns(self, start: int | Array, num_columns: int) -> Array:
        """Columns [start, start + num_columns) as values, [F, num_columns]."""
        if self.layer is None:
            return values(jax.lax.dynamic_slice_in_dim(self.leaf, start, num_columns, axis=1))
        sizes = (self.num_rows, num_columns)
        return values(_of_stack(self.leaf, self.layer, (0, start), sizes))

    def rows_at(self, number: Array) -> Array:
        """Returns the rows of these numbers as values, the nearest of one past the end: of a matrix
        of a layer.
        """
        return values(self.leaf.at[self.layer, number].get(mode="clip"))

    @property
    def is_native(self) -> bool:
        """Tells whether a CPU may multiply with `dot_natively`."""
        return native.takes(self.leaf.shape, self.dtype)

    def dot_natively(self, x_TD: Array) -> Array:
        """Multiplies with all of it, where it lies: [T, F] float32. On a CPU only."""
        w_NFD, number = _flattened(self.leaf, self.layer)
        return native.matmul(x_TD, w_NFD, number)

    def dot(self, x_TD: Array, start: int | Array, num_rows: int) -> Array:
        """Multiplies with so many rows: [T, num_rows] float32."""
        return dot(x_TD.astype(self.dtype), self.rows(start, num_rows))

    def dot_columns(self, x_TC: Array, start: int | Array) -> Array:
        """Multiplies with as many columns as x has: [T, F] float32."""
        return dot(x_TC.astype(self.dtype), self.columns(start, x_TC.shape[1]))


@pytree
class Packed:
    """A weight [F, D] that is kept quantised, of one layer in stacked leaves: values [L, G, F, C]
    for G groups of C = D / G columns, scales [L, G, F], and zero points like those if it has some.
    It is (value - zero point) * scale, and multiplied as `dtype`. tables: values of 4 bits stand
    for 16 numbers [L, 16]. factors: another scale of each whole weight, [L]. Of experts all have
    [L, E] in front.

    A leaf of uint8 [L, G, F, C / 2] has pairs of 4 bits (`packing.in_pairs`). is_dynamic: what it
    is multiplied with is quantised too, each token with a scale of its own, and the products are
    those of int8.
    """

    leaf: Array
    scales: Array
    zeros: Array | None
    tables: Array | None
    factors: Array | None
    layer: Place
    dtype: np.dtype = static()
    is_dynamic: bool = static(default=False)

    @property
    def num_groups(self) -> int:
        return self.leaf.shape[-3]

    @property
    def num_rows(self) -> int:
        return self.leaf.shape[-2]

    @property
    def num_columns(self) -> int:
        return self.num_groups * self.group

    @property
    def group(self) -> int:
        """Returns how many columns share a scale."""
        width = self.leaf.shape[-1]
        return 2 * width if self.leaf.dtype == jnp.uint8 else width

    @property
    def column_unit(self) -> int:
        return LANES if self.num_groups == 1 else math.lcm(LANES, self.group)

    @property
    def is_native(self) -> bool:
        """Tells whether a CPU may multiply with `dot_natively`."""
        if self.is_dynamic:
            return self.num_groups == 1 and native.takes(self.leaf.shape, self.leaf.dtype)
        return native.takes_packed(self.leaf.shape, self.leaf.dtype, self.dtype)

    def dot_natively(self, x_TD: Array) -> Array:
        """Multiplies with all of it, where it lies: [T, F] float32. On a CPU only."""
        if self.is_dynamic:
            values_NGFC, number = _flattened(self.leaf, self.layer, 3)
            scale_GF = self._of_layer(self.scales, *self._whole).astype(jnp.float32)
            y_TF = _dot_int8(x_TD, jax.lax.squeeze(values_NGFC, (1,)), number) * scale_GF
        else:
            y_TF = _dot_packed(x_TD, self)
        # What is added to a scaled product must not become one rounding with it for some T only.
        return jax.lax.optimization_barrier(y_TF)

    @property
    def _whole(self) -> tuple[tuple[int, int], tuple[int, int]]:
        return (0, 0), (self.num_groups, self.num_rows)

    def of_expert(self, number: Array) -> Packed:
        return replace(self, layer=_expert_of(self.layer, number))

    def dot(self, x_TD: Array, start: int | Array, num_rows: int) -> Array:
        rows = (0, start), (self.num_groups, num_rows)
        values_GFC = self._of_layer(self.leaf, *rows, 0, self.leaf.shape[-1])
        return self._multiply(x_TD, values_GFC, *rows)

    def dot_columns(self, x_TC: Array, start: int | Array) -> Array:
        count, width = x_TC.shape[1], self.leaf.shape[-1]
        if self.num_groups == 1 and self.leaf.dtype == jnp.uint8:
            start, count = start // 2, count // 2
        if self.num_groups == 1:
            values_GFC = self._of_layer(self.leaf, *self._whole, start, count)
            return self._multiply(x_TC, values_GFC, *self._whole)
        groups = (start // self.group, 0), (count // self.group, self.num_rows)
        return self._multiply(x_TC, self._of_layer(self.leaf, *groups, 0, width), *groups)

    def _of_layer(
        self, leaf: Array, starts: tuple[Any, Any], sizes: tuple[int, int], *columns: Any
    ) -> Array:
        """Returns groups and rows of the layer from `starts` on, and (start, count) of columns."""
        first, count = ((columns[0],), (columns[1],)) if columns else ((), ())
        return _of_stack(leaf, self.layer, (*starts, *first), (*sizes, *count))

    def _multiply(
        self, x_TD: Array, values_GFC: Array, starts: tuple[Any, Any], sizes: tuple[int, int]
    ) -> Array:
        scale_GF = self._of_layer(self.scales, starts, sizes).astype(jnp.float32)
        if self.is_dynamic and values_GFC.dtype == jnp.int8 and self.num_groups == 1:
            return _dot_int8(x_TD, values_GFC[0]) * scale_GF
        x_TD, w_GFC = x_TD.astype(self.dtype), self._numbers(values_GFC)
        if self.zeros is None and self.num_groups == 1:
            y_TF = dot(x_TD, w_GFC[0].astype(self.dtype)) * scale_GF
        else:
            if self.zeros is not None:
                w_GFC -= self._of_layer(self.zeros, starts, sizes).astype(w_GFC.dtype)[..., None]
            w_GFC *= scale_GF.astype(w_GFC.dtype)[..., None]
            y_TF = jax.lax.dot_general(
                x_TD.reshape(x_TD.shape[0], *w_GFC.shape[::2]),
                w_GFC.astype(self.dtype),
                (((1, 2), (0, 2)), ((), ())),
                precision=jax.lax.Precision.HIGHEST if self.dtype == jnp.float32 else None,
                preferred_element_type=jnp.float32,
            )
        return y_TF if self.factors is None else y_TF * self.factors[self.layer]

    def _numbers(self, values: Array) -> Array:
        """Returns the numbers that values stand for before they are scaled: as `dtype`, those of a
        table as float32, so that what is scaled is rounded once.
        """
        if values.dtype == jnp.uint8:
            pairs = jax.lax.bitcast_convert_type(values, jnp.int4)
            values = pairs.reshape(*values.shape[:-1], -1)
        if self.tables is None:
            return values.astype(self.dtype)
        # Halving the table by each bit takes 15 selections, which compilers make part of the matmul
        # that reads them; a gather would be one load for each number.
        bits = values.astype(jnp.int32)
        numbers = list(self.tables[self.layer])
        for place in range(4):
            is_set = (bits >> place) & 1 != 0
            evens_and_odds = zip(numbers[::2], numbers[1::2], strict=True)
            numbers = [jnp.where(is_set, odd, even) for even, odd in evens_and_odds]
        return numbers[0]


class Extended:
    """Is a weight like its `base`, to which something is added."""

    base: Matrix | Packed

    @property
    def num_rows(self) -> int:
        return self.base.num_rows

    @property
    def num_columns(self) -> int:
        return self.base.num_columns

    @property
    def column_unit(self) -> int:
        return self.base.column_unit

    @property
    def dtype(self) -> np.dtype:
        return self.base.dtype


@pytree
class Summed(Extended):
    """A weight [F, D] and the product of two more, [F, X] and [X, D], that is added to it."""

    base: Matrix | Packed
    down: Matrix | Packed
    up: Matrix | Packed

    def dot(self, x_TD: Array, start: int | Array, num_rows: int) -> Array:
        """Multiplies with so many rows: [T, num_rows] float32."""
        y_TX = self.down.dot(x_TD, 0, self.down.num_rows)
        return self.base.dot(x_TD, start, num_rows) + self.up.dot(y_TX, start, num_rows)


@dataclass(frozen=True)
class Chosen:
    """Stands where a weight does, for what each token multiplies with matrices that it has chosen.

    num_columns: numbers that `multiply` takes of a token, [T, num_columns], of which it makes
    [T, F] float32.
    """

    num_columns: int
    dtype: np.dtype
    multiply: Callable[[Array], Array]


AnyMatrix = Matrix | Packed


@jax.custom_jvp
def _dot_int8(x_TD: Array, w: Array, number: int | Array | None = None) -> Array:
    """Multiplies int8 with int8 in int32: w is [F, D], or a stack [N, F, D] of which a CPU takes
    one natively. Source: arXiv 2211.10438, section 3 (a scale per token and output). Raises:
    NotImplementedError where it is differentiated.
    """
    x_TD = x_TD.astype(jnp.float32)
    scale_T1 = jnp.maximum(jnp.abs(x_TD).max(axis=1, keepdims=True), 1e-30) / 127
    rounded_TD = jnp.round(x_TD / scale_T1).astype(jnp.int8)
    if number is not None:
        y_TF = native.matmul_int8(rounded_TD, w, number)
    else:
        y_TF = jax.lax.dot_general(
            rounded_TD, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32
        )
    return y_TF.astype(jnp.float32) * scale_T1


@jax.custom_jvp
def _dot_packed(x_TD: Array, w: Packed) -> Array:
    """Multiplies with numbers that a CPU makes of the values where it multiplies with them. They
    are those of `Packed.dot`.
    """
    # One scale for all of a row is multiplied with what comes out.
    is_scaled = w.zeros is not None or w.num_groups > 1
    values_NGFC, number = _flattened(w.leaf, w.layer, 3)
    zeros_NGF = None if w.zeros is None else _flattened(w.zeros, w.layer)[0]
    if not is_scaled:
        scales_NGF = None
    elif w.scales.dtype == w.dtype:
        scales_NGF, _ = _flattened(w.scales, w.layer)
    else:
        rounded = w.dtype if w.tables is None else jnp.float32
        scales_NGF = w._of_layer(w.scales, *w._whole).astype(rounded)[None]
    if w.tables is None and native.takes_int4(w.leaf.dtype, w.group, w.dtype):
        y_TF = native.matmul_int4(x_TD, values_NGFC, number, scales_NGF, zeros_NGF)
    else:
        table = None if w.tables is None else w.tables[w.layer]
        more = scales_NGF, zeros_NGF, table, w.dtype
        y_TF = native.matmul_packed(x_TD, values_NGFC, number, *more)
    if not is_scaled:
        y_TF = y_TF * w._of_layer(w.scales, *w._whole).astype(jnp.float32)
    return y_TF if w.factors is None else y_TF * w.factors[w.layer]


@_dot_packed.defjvp
def _derivative(primals: Any, tangents: Any) -> Any:
    def plain(x_TD: Array, w: Packed) -> Array:
        return w.dot(x_TD, 0, w.num_rows)

    return _dot_packed(*primals), jax.jvp(plain, primals, tangents)[1]


@_dot_int8.defjvp
def _refuse_gradient(primals: Any, tangents: Any) -> Any:
    raise NotImplementedError(
        "gradients: inputs of matrices in int8_dynamic are rounded, whose gradient is 0; load "
        "the weights in int8 or unquantised"
    )


class HeadMatrices(NamedTuple):
    """A weight [F, D] of each of N heads, of one layer in a stacked leaf [L, N, F, D]."""

    leaf: Array
    layer: Array

    @property
    def num_heads(self) -> int:
        return self.leaf.shape[1]

    @property
    def num_rows(self) -> int:
        return self.leaf.shape[2]

    @property
    def num_columns(self) -> int:
        return self.leaf.shape[3]

    def dot(self, x_TND: Array) -> Array:
        """Multiplies each head's part with its weight: [T, N, F] float32."""
        return jax.lax.platform_dependent(x_TND, self, cpu=_heads_in_turn, default=_heads_at_once)

    def dot_all(self, x_TD: Array) -> Array:
        """Multiplies the same x with each head's weight: [N, T, F] float32."""
        return self._dot_shared(x_TD, column=1)

    def dot_back(self, x_TF: Array) -> Array:
        """Multiplies the same x with each head's weight transposed: [N, T, D] float32."""
        return self._dot_shared(x_TF, column=0)

    def _dot_shared(self, x: Array, *, column: int) -> Array:
        in_turn, at_once = (partial(form, column) for form in (_shared_in_turn, _shared_at_once))
        return jax.lax.platform_dependent(x, self, cpu=in_turn, default=at_once)

    def of_head(self, n: Array) -> Array:
        """Returns the weight of a head as values, [F, D]."""
        start, size = (self.layer, n, 0, 0), (1, 1, self.num_rows, self.num_columns)
        return values(jax.lax.dynamic_slice(self.leaf, start, size)[0, 0])


def _heads_at_once(x_TND: Array, w: HeadMatrices) -> Array:
    w_NFD = values(w.leaf[w.layer])
    y_NTF = jax.lax.dot_general(
        x_TND.astype(w_NFD.dtype),
        w_NFD,
        (((2,), (2,)), ((1,), (0,))),
        precision=jax.lax.Precision.HIGHEST if w_NFD.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
    return y_NTF.transpose(1, 0, 2)


def _heads_in_turn(x_TND: Array, w: HeadMatrices) -> Array:
    """Multiplies head by head: in float32 XLA:CPU adds up a batch of matmuls in another order for
    another number of tokens.
    """

    def one(n: Array) -> Array:
        w_FD = w.of_head(n)
        return dot(x_TND[:, n].astype(w_FD.dtype), w_FD)

    return jax.lax.map(one, jnp.arange(w.num_heads)).transpose(1, 0, 2)


def _shared_at_once(column: int, x: Array, w: HeadMatrices) -> Array:
    w_NFD = values(w.leaf[w.layer])
    y_TNX = _contracted(x.astype(w_NFD.dtype), w_NFD, column + 1)
    return y_TNX.transpose(1, 0, 2)


def _shared_in_turn(column: int, x: Array, w: HeadMatrices) -> Array:
    """Multiplies head by head: XLA:CPU would lay out all weights anew for one matmul."""

    def one(n: Array) -> Array:
        w_FD = w.of_head(n)
        return _contracted(x.astype(w_FD.dtype), w_FD, column)

    return jax.lax.map(one, jnp.arange(w.num_heads))


class Vectors(NamedTuple):
    """A vector [F] of each expert of one layer in a stacked leaf [L, E, F]."""

    leaf: Array
    layer: Array

    @property
    def is_native(self) -> bool:
        """Tells whether a CPU may do natively what is done with it, as of a matrix."""
        return True

    def of_expert(self, number: Array) -> Array:
        """Returns the vector of an expert, as values."""
        return values(self.leaf[self.layer, number])


class Table(NamedTuple):
    """Rows of whole numbers, one behind the other, of one layer in a stacked leaf [L, V * K] of
    int32: of an array [L, V, K] with few numbers in a row XLA:TPU makes a copy with another layout.
    """

    leaf: Array
    layer: Array

    def rows(self, number_T: Array, size: int) -> Array:
        """Returns rows of `size` numbers, [T, K]: the last number for what is past the last row."""
        place_TK = number_T[:, None] * size + jnp.arange(size)[None]
        return self.leaf.at[self.layer, place_TK].get(mode="clip")


def values(leaf: Array) -> Array:
    """Returns the leaf's values where it holds bits."""
    return jax.lax.bitcast_convert_type(leaf, jnp.bfloat16) if leaf.dtype == jnp.uint16 else leaf


def dot(x_TD: Array, w_FD: Array) -> Array:
    """Multiplies x [T, D] with the rows of w [F, D]: [T, F] float32."""
    return _contracted(x_TD, w_FD, 1)


def _contracted(x: Array, w: Array, axis: int) -> Array:
    """Multiplies the last axis of x with one of w, in float32."""
    return jax.lax.dot_general(
        x,
        w,
        (((x.ndim - 1,), (axis,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if w.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
