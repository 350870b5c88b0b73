"""The small pure functions that a decoder layer is made of. Float32 inside, the weights' dtype at
matmul inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.axes import Array
from jaxkv.pytree import pytree, static

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_pytorch_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "gelu_new": lambda x: jax.nn.gelu(x, approximate=True),
    "gelu_fast": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}

XIELU, CLAMPED = "xielu", "clamped_swiglu"
"""Activations with parameters of their own in each layer (`xielu`), and of gate and up together."""

PIECE_BYTES = 2**21
"""What a CPU takes of a matrix at once where it has to copy it: as much as a core keeps in its
second-level cache.
"""

MANY_TOKENS = 256
"""Tokens from which the arithmetic of a matmul outweighs that copy, so that one piece is faster
than several.
"""

MLP_BYTES = 2**24
"""What a TPU holds of the float32 values between the matmuls of an MLP, at most: more runs in
pieces.
"""

LANES = 128
"""Columns of a TPU's registers."""

TILE_ROWS = 8
"""Rows that XLA:CPU takes at once of a matrix that it multiplies with a vector."""


Place = Array | tuple[Array, Array]
"""A layer's number in a stack, or those of a layer and its expert."""


def _of_stack(leaf: Array, layer: Place, starts: Sequence[Any], sizes: Sequence[int]) -> Array:
    """Returns a part of what a stack has for a layer or an expert. Not of a flattened stack: that
    would have a layout of its own, and all of the stack be copied to it.
    """
    at = layer if isinstance(layer, tuple) else (layer,)
    found = jax.lax.dynamic_slice(leaf, (*at, *starts), (*(1 for _ in at), *sizes))
    return jax.lax.squeeze(found, range(len(at)))


def _expert_of(layer: Place | None, number: Array) -> Place:
    if layer is None or isinstance(layer, tuple):
        raise TypeError(f"expected the number of a layer, got {layer}")
    return layer, number


class Matrix(NamedTuple):
    """A weight [F, D]: a leaf of its own, or the matrix of one layer in a stacked leaf [L, F, D],
    of one of its experts in [L, E, F, D].

    A uint16 leaf holds the bits of bfloat16 values (`config.bfloat16_as_bits`).
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

    def dot(self, x_TD: Array, start: int | Array, num_rows: int) -> Array:
        """Multiplies with so many rows: [T, num_rows] float32."""
        return _dot(x_TD.astype(self.dtype), self.rows(start, num_rows))

    def dot_columns(self, x_TC: Array, start: int | Array) -> Array:
        """Multiplies with as many columns as x has: [T, F] float32."""
        return _dot(x_TC.astype(self.dtype), self.columns(start, x_TC.shape[1]))


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
            whole = (0, 0), (1, self.num_rows)
            return self._multiply(x_TC, self._of_layer(self.leaf, *whole, start, count), *whole)
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
            y_TF = _dot(x_TD, w_GFC[0].astype(self.dtype)) * scale_GF
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


AnyMatrix = Matrix | Packed


def _dot_int8(x_TD: Array, w_FD: Array) -> Array:
    """Multiplies int8 with int8 in int32. Source: arXiv 2211.10438, section 3 (a scale per token
    and output).
    """
    x_TD = x_TD.astype(jnp.float32)
    scale_T1 = jnp.maximum(jnp.abs(x_TD).max(axis=1, keepdims=True), 1e-30) / 127
    rounded_TD = jnp.round(x_TD / scale_T1).astype(jnp.int8)
    y_TF = jax.lax.dot_general(
        rounded_TD, w_FD, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32
    )
    return y_TF.astype(jnp.float32) * scale_T1


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
        start, size = (w.layer, n, 0, 0), (1, 1, w.num_rows, w.num_columns)
        w_FD = values(jax.lax.dynamic_slice(w.leaf, start, size)[0, 0])
        return _dot(x_TND[:, n].astype(w_FD.dtype), w_FD)

    return jax.lax.map(one, jnp.arange(w.num_heads)).transpose(1, 0, 2)


class Vectors(NamedTuple):
    """A vector [F] of each expert of one layer in a stacked leaf [L, E, F]."""

    leaf: Array
    layer: Array

    def of_expert(self, number: Array) -> Array:
        """Returns the vector of an expert, as values."""
        return values(self.leaf[self.layer, number])


def values(leaf: Array) -> Array:
    """Returns the leaf's values where it holds bits."""
    return jax.lax.bitcast_convert_type(leaf, jnp.bfloat16) if leaf.dtype == jnp.uint16 else leaf


def linear(x_TD: Array, w: AnyMatrix, bias_F: Array | None = None) -> Array:
    """Computes x @ w.T + bias with a float32 result.

    The weight keeps the checkpoint's [out, in] layout. Asking for a float32 result is what makes
    bfloat16 fast on XLA:CPU (1.3 ms against 18 ms for 8 rows of a 2048 x 5632 matmul on jaxlib
    0.10.2); one row alone is slow even so,
    therefore no step has fewer than two. Source: y = x A^T + b.
    """
    x_TD = x_TD.astype(w.dtype)
    if w.layer is None and w.leaf.dtype != jnp.uint16:
        y_TF = w.dot(x_TD, 0, w.num_rows)
    else:
        y_TF = jax.lax.platform_dependent(x_TD, w, cpu=_linear_in_pieces, default=_linear_at_once)
    return y_TF if bias_F is None else y_TF + bias_F.astype(jnp.float32)[None, :]


def linear_float32(x_TD: Array, w: Matrix) -> Array:
    """Computes `linear` in float32 whatever the weight's dtype: for what chooses."""
    w_FD = w.rows(0, w.num_rows).astype(jnp.float32)
    return _dot(x_TD.astype(jnp.float32), w_FD)


def linear_over(
    x_TD: Array, w: AnyMatrix, bias_F: Array | None = None, *, axis: str | None
) -> Array:
    """Computes `linear` where each device along the mesh axis has some columns of x and w: their
    products are added up.
    """
    return add_up(linear(x_TD, w), bias_F, axis)


def add_up(y_TF: Array, bias_F: Array | None, axis: str | None) -> Array:
    if axis is not None:
        y_TF = jax.lax.psum(y_TF, axis)
    return y_TF if bias_F is None else y_TF + bias_F.astype(jnp.float32)[None, :]


def _linear_at_once(x_TD: Array, w: AnyMatrix) -> Array:
    return w.dot(x_TD, 0, w.num_rows)


def _linear_in_pieces(x_TD: Array, w: AnyMatrix) -> Array:
    """Multiplies piece by piece of w: XLA:CPU writes out what is sliced or bitcast for a matmul,
    here into the cache.

    A decode step of a 1.1B model spends half of its time on that copy otherwise
    (docs/benchmarks/cpu.md).
    """
    num_pieces = -(-w.num_rows * w.num_columns * w.dtype.itemsize // PIECE_BYTES)
    # In pieces or not, a bfloat16 result has the same bits. One of float32 has not: there T must
    # not decide.
    copy_is_small = x_TD.shape[0] >= MANY_TOKENS and w.dtype == jnp.bfloat16
    if num_pieces == 1 or copy_is_small:
        return _linear_at_once(x_TD, w)
    rows = -(-w.num_rows // num_pieces)

    def piece(i: Array, y_TF: Array) -> Array:
        # The last piece starts early rather than end late: what it computes twice is the same.
        start = jnp.minimum(i * rows, w.num_rows - rows)
        return jax.lax.dynamic_update_slice_in_dim(y_TF, w.dot(x_TD, start, rows), start, axis=1)

    y_TF = jnp.zeros((x_TD.shape[0], w.num_rows), jnp.float32)
    return jax.lax.fori_loop(0, num_pieces, piece, y_TF)


def _dot(x_TD: Array, w_FD: Array) -> Array:
    return jax.lax.dot_general(
        x_TD,
        w_FD,
        (((1,), (1,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if w_FD.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )


def total(x: Array) -> Array:
    """Sums over the last axis, on a CPU added up in the same order whatever the other axes are.
    Float32.
    """
    return jax.lax.platform_dependent(x, cpu=_total_by_tiles, default=partial(jnp.sum, axis=-1))


def _total_by_tiles(x: Array) -> Array:
    """XLA:CPU multiplies a matrix with a vector by tiles of rows, each row in the same order, and
    the rows left over in another. What it makes of a plain sum depends on the number of rows.
    """
    rows_RD = x.reshape(-1, x.shape[-1])
    num_rows = rows_RD.shape[0]
    rows_RD = jnp.pad(rows_RD, ((0, -num_rows % TILE_ROWS), (0, 0)))
    ones_D = jnp.ones(x.shape[-1], jnp.float32)
    return jnp.dot(rows_RD, ones_D, precision=jax.lax.Precision.HIGHEST)[:num_rows].reshape(
        x.shape[:-1]
    )


def rms_norm(x: Array, scale: Array, *, eps: float, axis: str | None = None) -> Array:
    """Normalises by the root mean square over the last axis, of which each device along the mesh
    axis has an equal part. Float32 in and out. Source: arXiv 1910.07467, equation 4.
    """
    x = x.astype(jnp.float32)
    scale = jnp.expand_dims(scale.astype(jnp.float32), tuple(range(x.ndim - scale.ndim)))
    squares, width = total(x * x)[..., None], x.shape[-1]
    if axis is not None:
        squares, width = jax.lax.psum(squares, axis), width * jax.lax.axis_size(axis)
    return x * jax.lax.rsqrt(squares / width + eps) * scale


def layer_norm(x: Array, scale: Array, bias: Array | None, *, eps: float) -> Array:
    """Normalises by mean and variance over the last axis, float32 in and out. Source: arXiv
    1607.06450, equation 4.
    """
    x = x.astype(jnp.float32)
    centred = x - total(x)[..., None] / x.shape[-1]
    y = rms_norm(centred, scale, eps=eps)
    if bias is None:
        return y
    return y + jnp.expand_dims(bias.astype(jnp.float32), tuple(range(x.ndim - 1)))


def soft_cap(x: Array, cap: float) -> Array:
    """Keeps values between -cap and cap, smoothly: cap * tanh(x / cap). Source: arXiv 2408.00118,
    section 2.
    """
    return jnp.tanh(x / cap) * cap


def by_pieces(function: Callable[..., Any], *rows: Any, size: int) -> Any:
    """Computes function(*rows) with `size` rows of all arrays at a time: what it computes in
    between is that much smaller.

    Rows must not depend on each other. The last piece starts early rather than end late.
    """
    num_rows = jax.tree.leaves(rows)[0].shape[0]
    if num_rows <= size:
        return function(*rows)

    def piece(i: Array, found: Any) -> Any:
        start = jnp.minimum(i * size, num_rows - size)
        new = function(*jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, size), rows))
        return jax.tree.map(
            lambda x, y: jax.lax.dynamic_update_slice_in_dim(x, y, start, 0), found, new
        )

    shapes = jax.eval_shape(function, *jax.tree.map(lambda x: x[:size], rows))
    empty = jax.tree.map(lambda x: jnp.zeros((num_rows, *x.shape[1:]), x.dtype), shapes)
    return jax.lax.fori_loop(0, -(-num_rows // size), piece, empty)


def mlp(
    x_TD: Array,
    w: Mapping[str, Any],
    *,
    activation: str,
    gate_factor: float = 1.0,
    axis: str | None = None,
) -> Array:
    """Computes down(act(gate(x)) * up(x)), or down(act(up(x))) without a gate, each with its bias
    where `w` has one; `axis` as in `linear_over`. gate_factor: of what goes into act.

    Source: arXiv 2002.05202, section 2.
    """
    names = ("gate", "gate_bias", "up", "up_bias", "down")
    own = {name: w[name] for name in names if name in w}
    join = clamped_swiglu if activation == CLAMPED else gated(activation, w, gate_factor)
    at_once, in_pieces = (partial(one, join=join) for one in (_mlp_at_once, _mlp_in_pieces))
    y_TD = jax.lax.platform_dependent(x_TD, own, tpu=in_pieces, default=at_once)
    return add_up(y_TD, w.get("down_bias"), axis)


Join = Callable[[Array | None, Array], Array]
"""(gate or None, up) -> what goes down."""


def gated(activation: str, w: Mapping[str, Any], factor: float = 1.0) -> Join:
    """Returns act(factor * gate) * up, or act(up) without a gate."""
    act = partial(xielu, w=w) if activation == XIELU else ACTIVATIONS[activation]

    def join(gate: Array | None, up: Array) -> Array:
        if gate is None:
            return act(up)
        return act(gate if factor == 1.0 else gate * factor) * up

    return join


def clamped_swiglu(gate: Array | None, up: Array) -> Array:
    """Computes (up + 1) * gate * sigmoid(1.702 gate), both bounded by 7. Source: gpt-oss's
    reference code.
    """
    if gate is None:
        raise ValueError("clamped_swiglu: expected a gate, got None")
    gate = jnp.minimum(gate, 7.0)
    return (jnp.clip(up, -7.0, 7.0) + 1) * gate * jax.nn.sigmoid(1.702 * gate)


def _mlp_at_once(x_TD: Array, w: Mapping[str, Any], *, join: Join) -> Array:
    up_TF = linear(x_TD, w["up"], w.get("up_bias"))
    gate_TF = linear(x_TD, w["gate"], w.get("gate_bias")) if "gate" in w else None
    return linear(join(gate_TF, up_TF), w["down"])


def _mlp_in_pieces(x_TD: Array, w: Mapping[str, Any], *, join: Join) -> Array:
    """Takes some of F after the other, so that its float32 values never exist together: 112 MiB for
    2,048 tokens of 14,336.

    Reads each weight once, whatever the number of pieces.
    """
    num_tokens, width = x_TD.shape[0], w["up"].num_rows
    size = _piece_of(width, MLP_BYTES // (4 * num_tokens), w["down"].column_unit)
    if size == width:
        return _mlp_at_once(x_TD, w, join=join)

    def piece(i: Array, y_TD: Array) -> Array:
        def part(name: str) -> Array:
            y_TC = w[name].dot(x_TD, i * size, size)
            if f"{name}_bias" not in w:
                return y_TC
            bias_C = jax.lax.dynamic_slice_in_dim(w[f"{name}_bias"], i * size, size)
            return y_TC + bias_C.astype(jnp.float32)[None, :]

        h_TC = join(part("gate") if "gate" in w else None, part("up"))
        return y_TD + w["down"].dot_columns(h_TC, i * size)

    return jax.lax.fori_loop(
        0, width // size, piece, jnp.zeros((num_tokens, w["down"].num_rows), jnp.float32)
    )


def _piece_of(width: int, most: int, unit: int) -> int:
    """Returns the largest part of `width` of at most `most`, in whole units; `width` where there is
    none.
    """
    sizes = (width // n for n in range(1, width // unit + 1) if width % (n * unit) == 0)
    return next((size for size in sizes if size <= most), width)


def xielu(x: Array, *, w: Mapping[str, Any]) -> Array:
    """Computes xIELU, whose parameters a layer has. Source: arXiv 2411.13010, equation 19."""
    of_positive, of_negative, beta, eps = (
        w[f"act_{name}"].astype(jnp.float32).reshape(())
        for name in ("alpha_p", "alpha_n", "beta", "eps")
    )
    positive = jax.nn.softplus(of_positive) * x * x + beta * x
    negative = (jnp.expm1(jnp.minimum(x, eps)) - x) * (beta + jax.nn.softplus(of_negative))
    return jnp.where(x > 0, positive, negative + beta * x)


class Rotation(NamedTuple):
    """Holds cos and sin [T, dim/2] of the first `dim` dimensions of each head, which are paired as
    `RopeSpec.interleaved` says.
    """

    cos_TP: Array
    sin_TP: Array
    interleaved: bool = False


def rope_tables(
    position_T: Array, inv_freq: np.ndarray | Array, factor: float
) -> tuple[Array, Array]:
    """Returns (cos, sin) [T, P] float32, times YaRN's attention factor; inv_freq [P] or [T, P]."""
    angle = position_T.astype(jnp.float32)[:, None] * jnp.atleast_2d(
        jnp.asarray(inv_freq, jnp.float32)
    )
    return jnp.cos(angle) * factor, jnp.sin(angle) * factor


def apply_rope(x_TNH: Array, rotation: Rotation) -> Array:
    """Rotates every head, or the first dimensions of it.

    Source: arXiv 2104.09864, equation 34; without interleaving with dimension i paired with i +
    dim/2 ("rotate half" order of Hugging Face checkpoints).
    """
    cos, sin = rotation.cos_TP[:, None, :], rotation.sin_TP[:, None, :]
    dim = 2 * cos.shape[-1]
    x, rest = x_TNH[..., :dim].astype(jnp.float32), x_TNH[..., dim:].astype(jnp.float32)
    if rotation.interleaved:
        lower, upper = x[..., 0::2], x[..., 1::2]
        pairs = jnp.stack([lower * cos - upper * sin, upper * cos + lower * sin], axis=-1)
        return jnp.concatenate([pairs.reshape(x.shape), rest], axis=-1)
    lower, upper = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([lower * cos - upper * sin, upper * cos + lower * sin, rest], axis=-1)


def default_inv_freq(theta: float, head_dim: int) -> np.ndarray:
    """Computes theta^(-2i/H) for i in [0, H/2), float32."""
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    return (1.0 / np.float32(theta) ** exponent).astype(np.float32)


def proportional_inv_freq(theta: float, head_dim: int, part: float, factor: float) -> np.ndarray:
    """Computes default frequencies, divided by `factor`, for that part of the pairs and 0 for the
    others, which thus are not rotated. Source: Gemma 4's reference code.
    """
    inv_freq = default_inv_freq(theta, head_dim) / np.float32(factor)
    inv_freq[int(part * head_dim // 2) :] = 0
    return inv_freq.astype(np.float32)


def llama3_inv_freq(
    inv_freq: np.ndarray,
    *,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_len: int,
) -> np.ndarray:
    """Slows low frequencies by `factor`, keeps high ones, blends between. Source: Llama 3.1's
    reference code.
    """
    wavelength = 2 * math.pi / inv_freq
    smooth = (original_max_len / wavelength - low_freq_factor) / (
        high_freq_factor - low_freq_factor
    )
    blended = (1 - smooth) * inv_freq / factor + smooth * inv_freq
    low, high = original_max_len / low_freq_factor, original_max_len / high_freq_factor
    scaled = np.where(
        wavelength > low, inv_freq / factor, np.where(wavelength < high, inv_freq, blended)
    )
    return scaled.astype(np.float32)


def yarn_inv_freq(
    theta: float,
    head_dim: int,
    *,
    factor: float,
    original_max_len: int,
    beta_fast: float,
    beta_slow: float,
    truncate: bool,
) -> np.ndarray:
    """NTK-by-parts interpolation. Source: YaRN, arXiv 2309.00071, section 3.2."""

    def dim_of(rotations: float) -> float:
        """Returns the (fractional) dimension pair that makes this many rotations over the original
        context.
        """
        return (
            head_dim
            * math.log(original_max_len / (rotations * 2 * math.pi))
            / (2 * math.log(theta))
        )

    low, high = dim_of(beta_fast), dim_of(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = np.clip(
        (np.arange(head_dim // 2, dtype=np.float32) - low) / max(high - low, 0.001), 0, 1
    )
    inv_freq = default_inv_freq(theta, head_dim)
    return (inv_freq / factor * ramp + inv_freq * (1 - ramp)).astype(np.float32)
