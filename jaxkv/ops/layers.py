"""The small pure functions that a decoder layer is made of. Float32 inside, the weights' dtype at
matmul inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxkv.axes import Array, MeshAxes
from jaxkv.ops import native
from jaxkv.ops.adapters import Adapted
from jaxkv.ops.matrices import AnyMatrix, Chosen, Matrix, Packed, Summed, dot


def gelu_tanh(x: Array) -> Array:
    """Computes x * (1 + tanh(y)) / 2 for y = sqrt(2 / pi) * (x + 0.044715 x^3).

    It is computed as x times a sigmoid, which is equal. Where x is far below 0, float32 keeps no
    digit of 1 + tanh(y). The result is next to nothing there, but a norm behind the MLP makes it
    large where all values of a token are so small: with tanh one token of a tiny Gemma 4 was 9e-4
    of the logits' deviation off float64.
    Source: arXiv 1606.08415, section 2.
    """
    return x * jax.nn.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_pytorch_tanh": gelu_tanh,
    "gelu_new": gelu_tanh,
    "gelu_fast": gelu_tanh,
    "gelu_python": lambda x: jax.nn.gelu(x, approximate=False),
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
    "swish": jax.nn.silu,
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

TILE_ROWS = 8
"""Rows that XLA:CPU takes at once of a matrix that it multiplies with a vector."""


def linear(
    x_TD: Array, w: AnyMatrix | Summed | Adapted | Chosen, bias_F: Array | None = None
) -> Array:
    """Computes x @ w.T + bias with a float32 result.

    The weight keeps the checkpoint's [out, in] layout. Asking for a float32 result is what makes
    bfloat16 fast on XLA:CPU (1.3 ms against 18 ms for 8 rows of a 2048 x 5632 matmul on jaxlib
    0.10.2); one row alone is slow even so, therefore no step has fewer than two. Source: y = x A^T
    + b.
    """
    if isinstance(w, Adapted):
        return w.added_to(linear(x_TD, w.base, bias_F), x_TD)
    if isinstance(w, Chosen):
        y_TF = w.multiply(x_TD)
        return y_TF if bias_F is None else y_TF + bias_F.astype(jnp.float32)[None, :]
    if isinstance(w, Summed):
        return linear(x_TD, w.base, bias_F) + linear(linear(x_TD, w.down), w.up)
    x_TD, num_tokens = x_TD.astype(w.dtype), x_TD.shape[0]
    if w.num_rows == 1:  # as in `total`
        x_TD = jnp.pad(x_TD, ((0, -num_tokens % TILE_ROWS), (0, 0)))
    if w.is_native:
        y_TF = jax.lax.platform_dependent(
            x_TD, w, cpu=lambda x_TD, w: w.dot_natively(x_TD), default=_linear_at_once
        )
    elif w.layer is None and w.leaf.dtype != jnp.uint16:
        y_TF = w.dot(x_TD, 0, w.num_rows)
    else:
        y_TF = jax.lax.platform_dependent(x_TD, w, cpu=_linear_in_pieces, default=_linear_at_once)
    y_TF = y_TF[:num_tokens]
    return y_TF if bias_F is None else y_TF + bias_F.astype(jnp.float32)[None, :]


def linear_float32(x_TD: Array, w: Matrix) -> Array:
    """Computes `linear` in float32 whatever the weight's dtype: for what chooses."""
    x_TD, w_FD = x_TD.astype(jnp.float32), w.rows(0, w.num_rows).astype(jnp.float32)
    if not native.takes(w_FD.shape, w_FD.dtype):
        return dot(x_TD, w_FD)
    return jax.lax.platform_dependent(
        x_TD, w_FD, cpu=lambda x_TD, w_FD: native.matmul(x_TD, w_FD[None], 0), default=dot
    )


def linear_by_group(x_TD: Array, w: AnyMatrix | Adapted) -> Array:
    """Multiplies groups of x's columns, each of as many as w has, with rows of w of their own: the
    first group with the first rows.
    """
    groups = jnp.split(x_TD, x_TD.shape[1] // w.num_columns, axis=1)
    num_rows = w.num_rows // len(groups)
    found = [w.dot(x_TC, group * num_rows, num_rows) for group, x_TC in enumerate(groups)]
    return jnp.concatenate(found, axis=1)


def linear_over(
    x_TD: Array,
    w: AnyMatrix | Adapted | Chosen,
    bias_F: Array | None = None,
    *,
    axis: MeshAxes | None,
) -> Array:
    """Computes `linear` where each device along the mesh axis has some columns of x and w: their
    products are added up.
    """
    return add_up(linear(x_TD, w), bias_F, axis)


def add_up(y_TF: Array, bias_F: Array | None, axis: MeshAxes | None) -> Array:
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
    # In pieces or not, a bfloat16 result has the same bits. One of float32 has not, nor has what is
    # added to a scaled product, which both can be one rounding: there T must not decide.
    same_bits = w.dtype == jnp.bfloat16 and not isinstance(w, Packed)
    copy_is_small = x_TD.shape[0] >= MANY_TOKENS and same_bits
    if num_pieces == 1 or copy_is_small:
        return _linear_at_once(x_TD, w)
    rows = -(-w.num_rows // num_pieces)

    def piece(i: Array, y_TF: Array) -> Array:
        # The last piece starts early rather than end late: what it computes twice is the same.
        start = jnp.minimum(i * rows, w.num_rows - rows)
        return jax.lax.dynamic_update_slice_in_dim(y_TF, w.dot(x_TD, start, rows), start, axis=1)

    y_TF = jnp.zeros((x_TD.shape[0], w.num_rows), jnp.float32)
    return jax.lax.fori_loop(0, num_pieces, piece, y_TF)


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


def rounded(x: Array) -> Array:
    """Returns a product as it is, but in a form that a CPU does not add up to something without
    rounding it first: of two products that are added up, which of them is rounded would be the
    compiler's choice, another one in another program. Infinity becomes the largest number.
    """
    return jax.lax.platform_dependent(x, cpu=_at_most_the_largest, default=lambda x: x)


def _at_most_the_largest(x: Array) -> Array:
    """LLVM leaves it where it is, unlike a barrier or `reduce_precision`."""
    return jnp.minimum(x, jnp.finfo(jnp.float32).max)


def total_over(x: Array, axis: int) -> Array:
    """Sums over an axis, on a CPU in an order that nothing but its size decides."""
    by_halves, at_once = partial(_total_by_halves, axis), partial(jnp.sum, axis=axis)
    return jax.lax.platform_dependent(x, cpu=by_halves, default=at_once)


def _total_by_halves(axis: int, x: Array) -> Array:
    """Adds each number of the first half to one of the second, until there is one half."""
    while (size := x.shape[axis]) > 1:
        half = size // 2
        first, second, rest = (
            jax.lax.slice_in_dim(x, *ends, axis=axis)
            for ends in ((0, half), (half, 2 * half), (2 * half, size))
        )
        x = first + second
        x = x if size % 2 == 0 else jnp.concatenate([x, rest], axis=axis)
    return x.squeeze(axis)


def softmax(x: Array) -> Array:
    """Computes the softmax over the last axis, on a CPU with the same bits whatever the other axes
    are. Float32.
    """
    return jax.lax.platform_dependent(x, cpu=_softmax_by_tiles, default=jax.nn.softmax)


def _softmax_by_tiles(x: Array) -> Array:
    """XLA:CPU rounds a difference and its exponential otherwise where it makes them one operation,
    which depends on the number of rows. That of jax 0.10 does so with a barrier too.
    """
    below = x - jax.lax.stop_gradient(x.max(axis=-1, keepdims=True))
    weight = jax.lax.optimization_barrier(jnp.exp(jax.lax.optimization_barrier(below)))
    return weight / total(weight)[..., None]


def rms_norm(x: Array, scale: Array, *, eps: float, axis: MeshAxes | None = None) -> Array:
    """Normalises by the root mean square over the last axis, of which each device along the mesh
    axis has an equal part. Float32 in and out. Source: arXiv 1910.07467, equation 4.
    """
    x = x.astype(jnp.float32)
    scale = jnp.expand_dims(scale.astype(jnp.float32), tuple(range(x.ndim - scale.ndim)))
    squares, width = total(x * x)[..., None], x.shape[-1]
    if axis is not None:
        squares, width = jax.lax.psum(squares, axis), width * jax.lax.axis_size(axis)
    return x * jax.lax.rsqrt(squares / width + eps) * scale


def shortened(x: Array, longest: float) -> Array:
    """Returns vectors along the last axis, those that are longer than `longest` as long as that."""
    x = x.astype(jnp.float32)
    length = jnp.sqrt(total(x * x))[..., None]
    return x * jnp.minimum(longest / (length + 1e-6), 1)


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
    limit: float | Array | None = None,
    limits_act: bool = False,
    cutoff: float | None = None,
    norm: Callable[[Array], Array] | None = None,
    soft_limits: tuple[float, float] | None = None,
    axis: MeshAxes | None = None,
) -> Array:
    """Computes down(act(gate(x)) * up(x)), or down(act(up(x))) without a gate, each with its bias
    where `w` has one; `axis` as in `linear_over`. gate_factor: of what goes into act. limit,
    limits_act: as in `gated`. cutoff: as in `beyond`, of what goes into act. norm: of what goes
    down. soft_limits: those of `softcapped_swiglu`, which then takes the place of act.

    Source: arXiv 2002.05202, section 2.
    """
    names = ("gate", "gate_bias", "up", "up_bias", "down")
    own = {name: w[name] for name in names if name in w}
    if soft_limits is not None:
        join: Join = partial(softcapped_swiglu, limits=soft_limits)
    elif activation == CLAMPED:
        join = clamped_swiglu
    else:
        join = gated(activation, w, gate_factor, limit, limits_act)
    if cutoff is not None or norm is not None:  # which need all of a token
        join = _with_gains(join, w, gate_factor)
        whole = partial(_whole, join=join, cutoff=cutoff, norm=norm, axis=axis)
        return add_up(_mlp_at_once(x_TD, own, join=whole), w.get("down_bias"), axis)
    at_once, in_pieces = (partial(one, join=join) for one in (_mlp_at_once, _mlp_in_pieces))
    y_TD = jax.lax.platform_dependent(x_TD, own, tpu=in_pieces, default=at_once)
    return add_up(y_TD, w.get("down_bias"), axis)


Join = Callable[[Array | None, Array], Array]
"""(gate or None, up) -> what goes down."""


def gated(
    activation: str,
    w: Mapping[str, Any],
    factor: float = 1.0,
    limit: float | Array | None = None,
    limits_act: bool = False,
) -> Join:
    """Returns act(factor * gate) * up, or act(up) without a gate. limit: bounds up on both sides,
    and above the gate, or act(gate) if `limits_act`.
    """
    act = partial(xielu, w=w) if activation == XIELU else ACTIVATIONS[activation]

    def join(gate: Array | None, up: Array) -> Array:
        if gate is None:
            return act(up)
        if limit is not None:
            up = jnp.clip(up, -limit, limit)
            gate = gate if limits_act else jnp.minimum(gate, limit)
        acted = act(gate if factor == 1.0 else gate * factor)
        return (jnp.minimum(acted, limit) if limit is not None and limits_act else acted) * up

    return join


def _whole(
    gate: Array | None,
    up: Array,
    *,
    join: Join,
    cutoff: float | None,
    norm: Callable[[Array], Array] | None,
    axis: MeshAxes | None,
) -> Array:
    """Returns what goes down, where all of a token decides on each number."""
    if cutoff is not None:
        if gate is None:
            raise ValueError("cutoff: expected a gate, got None")
        gate = beyond(gate, cutoff, axis=axis)
    h = join(gate, up)
    return h if norm is None else norm(h)


def _with_gains(join: Join, w: Mapping[str, Any], factor: float) -> Join:
    """Returns what multiplies gate and up before they are joined, where `w` says by what."""
    if "up_gain" not in w:
        return join
    gate_gain_F, up_gain_F = (w[f"{name}_gain"].astype(jnp.float32) for name in ("gate", "up"))

    def gained(gate: Array | None, up: Array) -> Array:
        if gate is None:
            raise ValueError("gains: expected a gate, got None")
        return join(gate * gate_gain_F[None], up * up_gain_F[None] * factor)

    return gained


def beyond(x: Array, cutoff: float, *, axis: MeshAxes | None) -> Array:
    """Returns how far values exceed a bound, 0 for those that do not: `cutoff` standard deviations
    above the mean over the last axis, of which each device along the mesh axis has an equal part.
    Source: statistical top-k, arXiv 2506.06644, section 3.
    """

    def mean(y: Array) -> Array:
        summed, width = total(y)[..., None], y.shape[-1]
        if axis is not None:
            summed, width = jax.lax.psum(summed, axis), width * jax.lax.axis_size(axis)
        return summed / width

    centred = x - mean(x)
    return jax.nn.relu(centred - cutoff * jnp.sqrt(mean(centred * centred)))


def clamped_swiglu(gate: Array | None, up: Array) -> Array:
    """Computes (up + 1) * gate * sigmoid(1.702 gate), both bounded by 7. Source: gpt-oss's
    reference code.
    """
    if gate is None:
        raise ValueError("clamped_swiglu: expected a gate, got None")
    gate = jnp.minimum(gate, 7.0)
    return (jnp.clip(up, -7.0, 7.0) + 1) * gate * jax.nn.sigmoid(1.702 * gate)


def softcapped_swiglu(gate: Array | None, up: Array, limits: tuple[float, float]) -> Array:
    """Computes gate * sigmoid(gate) * up, in which the first gate and up stay below a limit of each
    (`soft_cap`). Source: Inkling 2, as transformers has it.
    """
    if gate is None:
        raise ValueError("softcapped_swiglu: expected a gate, got None")
    return soft_cap(gate, limits[0]) * jax.nn.sigmoid(gate) * soft_cap(up, limits[1])


def _mlp_at_once(x_TD: Array, w: Mapping[str, Any], *, join: Join) -> Array:
    return linear(_joined(x_TD, w, join), w["down"])


def _joined(x_TD: Array, w: Mapping[str, Any], join: Join) -> Array:
    """Computes what goes down."""
    up_TF = linear(x_TD, w["up"], w.get("up_bias"))
    gate_TF = linear(x_TD, w["gate"], w.get("gate_bias")) if "gate" in w else None
    return join(gate_TF, up_TF)


def _mlp_in_pieces(x_TD: Array, w: Mapping[str, Any], *, join: Join) -> Array:
    """Takes some of F after the other, so that its float32 values never exist together: 112 MiB for
    2,048 tokens of 14,336.

    Reads each weight once, whatever the number of pieces.
    """
    num_tokens, width = x_TD.shape[0], w["up"].num_rows
    size = _piece_of(width, MLP_BYTES // (4 * num_tokens), w["down"].column_unit)
    if size == width:
        # Else XLA makes the matmul of `up` a part of that of `down`, which then takes longer than
        # both (v6e, docs/benchmarks/tpu_loop.md).
        h_TF = jax.lax.optimization_barrier(_joined(x_TD, w, join).astype(w["down"].dtype))
        return linear(h_TF, w["down"])

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
