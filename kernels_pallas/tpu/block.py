"""Holds what the attention kernels share: a block of pages as matmul operands, its scores, what is
known when compiling.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from kernels_pallas.tpu.layout import LANES, Layout
from kernels_pallas.tpu.packing import Packing

MASKED = -1e30
"""Score of a slot that is not seen: finite, so that a row that saw nothing yet gives no NaN."""

LOG2E = math.log2(math.e)
VMEM_BYTES = 60 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Static:
    """Holds what is known when compiling. packing: None for pages of floats; dtype: of matmuls'
    inputs; num_pages: of one layer; per_row: queries that meet a row of heads, where that is two
    heads the first one's before the second one's; block: pages; part: those of them whose scores
    prefill works on together; heads: rows of heads that decode works on without a loop; queries:
    tokens of a prefill block; rows: queries that are worked on at once; is_part: decode of latent
    rows also says what its softmaxes are; the rest: `attention`.
    """

    layout: Layout
    packing: Packing | None
    dtype: Any
    page_size: int
    num_pages: int
    per_row: int
    block: int
    part: int
    heads: int
    queries: int
    scale: float
    windowed: bool
    softcap: float | None
    sinks: bool
    streamed: bool
    is_part: bool
    wait_by_page: bool
    """One wait for each page rather than one for all: the plain interpreter knows no copies of
    traced size.
    """

    rows: int

    @property
    def slots(self) -> int:
        return self.block * self.page_size


def start_all(copies: list[Any]) -> None:
    for copy in copies:
        copy.start()


def wait_all(copies: list[Any]) -> None:
    for copy in copies:
        copy.wait()


def div(a: jax.Array, b: int) -> jax.Array:
    """Divides numbers that are not negative; `//` also handles the others, which costs scalar
    operations.
    """
    return jax.lax.div(a, jnp.int32(b))


def shifted(a: jax.Array, power: int) -> jax.Array:
    """Divides numbers that are not negative by a power of two, in one scalar operation; the
    compiler makes a chain of six of `div`.
    """
    return jax.lax.shift_right_logical(a, jnp.int32(power.bit_length() - 1))


def rest(a: jax.Array, power: int) -> jax.Array:
    """Returns what `shifted` leaves over."""
    return a & jnp.int32(power - 1)


def dot(a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
    dimensions = (((contract[0],), (contract[1],)), ((), ()))
    precision = jax.lax.Precision.HIGHEST if b.dtype == jnp.float32 else None
    return jax.lax.dot_general(
        a, b, dimensions, precision=precision, preferred_element_type=jnp.float32
    )


def across(x_RL: jax.Array, width: int) -> jax.Array:
    """Widens [R, LANES], equal in all lanes, to [R, width]."""
    copies = -(-width // LANES)
    return (jnp.concatenate([x_RL] * copies, axis=1) if copies > 1 else x_RL)[:, :width]


def across_sum(x_RS: jax.Array) -> jax.Array:
    """Sums every LANES-th term, [R, S] -> [R, LANES]. Lanes are added up once, at the end."""
    width = x_RS.shape[1]
    x_RS = jnp.pad(x_RS, ((0, 0), (0, -width % LANES)))
    total = x_RS[:, :LANES]
    for i in range(LANES, width, LANES):
        total += x_RS[:, i : i + LANES]
    return total


class PerPool(NamedTuple):
    """Holds one thing for the pool of pages, floats [L*P, C, S, X] or words, and one for the pool
    of their scales [L*P, 1, Z], None where pages are floats: the pool itself, a block of it in
    VMEM, what is new in it, its semaphores.
    """

    pages: Any
    scales: Any

    def each(self) -> list[Any]:
        return [x for x in self if x is not None]


class Columns(NamedTuple):
    """Holds [1, slots] or [M, slots]: a quantised element stands for scale * element + offset."""

    scale: jax.Array
    offset: jax.Array | None


class HeadRow(NamedTuple):
    """Names row `begin` + `offset` of heads, of which only the latter is known when compiling."""

    begin: int | jax.Array
    offset: int

    @property
    def number(self) -> int | jax.Array:
        return self.begin + self.offset


def elements(
    block: PerPool, row: int | jax.Array, static: Static, *, of_values: bool = False
) -> jax.Array:
    """Reads row `row` of all pages of a block, as a matmul operand [slots, X]; of latent pages all
    rows side by side, or those of the values. Quantised ones are the whole numbers.
    """
    layout = static.layout
    if layout.kind == "latent":
        count = layout.value_rows if of_values else layout.rows
        return jnp.concatenate([_elements(block, i, static) for i in range(count)], axis=1)
    return _elements(block, row, static)


def _elements(block: PerPool, row: int | jax.Array, static: Static) -> jax.Array:
    pages, _, size, width = block.pages.shape
    stored = block.pages[:, row].reshape(pages * size, width)
    return stored if static.packing is None else static.packing.elements(stored)


def columns(
    block: PerPool,
    row: HeadRow,
    static: Static,
    *,
    of_values: bool,
    factor: float = 1.0,
    held_1S: jax.Array | None = None,
) -> Columns | None:
    """Reads what acts on the columns of a row of heads in place of its elements, times `factor`;
    None for floats.

    held_1S: others get zeros, so that what nobody owns, which may be NaN, is not multiplied by a
    weight of zero.
    """
    packing = static.packing
    if packing is None:
        return None
    layout, size = static.layout, static.page_size
    per_row = 2 if layout.kind == "pairs" else 1

    def of_head(head: int, word: int) -> jax.Array:
        """Reads [1, slots], word `word` of head `head` of the row."""
        start = (word * layout.kv_heads + row.offset * per_row + head) * size
        group = static.heads * per_row * size
        pieces = []
        for i in range(block.scales.shape[0]):
            if isinstance(row.begin, int):
                piece = block.scales[i, :, pl.ds(start + row.begin * per_row * size, size)]
            else:  # lanes are loaded from a multiple of LANES on
                aligned = start // group * group
                begin = pl.multiple_of(row.begin * (per_row * size) + aligned, LANES)
                piece = block.scales[i, :, pl.ds(begin, group)][
                    :, start - aligned : start - aligned + size
                ]
            pieces.append(piece)
        words = jnp.concatenate(pieces, axis=1) if len(pieces) > 1 else pieces[0]
        bits = words & jnp.int32(-65536) if of_values else jax.lax.shift_left(words, jnp.int32(16))
        found = jax.lax.bitcast_convert_type(bits, jnp.float32)
        return found if held_1S is None else jnp.where(held_1S, found, 0.0)

    def of_heads(head: int) -> list[jax.Array]:
        scale = of_head(head, 0)
        found = [scale * (factor / packing.unit)]
        return (
            found
            if packing.words_per_slot == 1
            else [*found, (of_head(head, 1) + 0.5 * scale) * factor]
        )

    found = of_heads(0)
    if per_row == 2:
        shape = (static.rows, found[0].shape[1])
        is_first = jax.lax.broadcasted_iota(jnp.int32, shape, 0) < static.per_row // 2
        found = [jnp.where(is_first, x, y) for x, y in zip(found, of_heads(1), strict=True)]
    return Columns(found[0], found[1] if len(found) > 1 else None)


def scores(q_MX: jax.Array, block: PerPool, row: HeadRow, static: Static) -> jax.Array:
    """Returns [M, slots] float32, scaled (and capped) scores times log2(e). exp2 is one operation
    less than exp.
    """
    factor = static.scale * LOG2E if static.softcap is None else static.scale / static.softcap
    s = dot(q_MX, elements(block, row.number, static), (1, 1))
    of_keys = columns(block, row, static, of_values=False, factor=factor)
    s = s * (factor if of_keys is None else of_keys.scale)
    if of_keys is not None and of_keys.offset is not None:
        s += jnp.sum(q_MX.astype(jnp.float32), axis=1, keepdims=True) * of_keys.offset
    return s if static.softcap is None else jnp.tanh(s) * (static.softcap * LOG2E)


def weights(
    p_MS: jax.Array, of_values: Columns | None, static: Static
) -> tuple[jax.Array, jax.Array | None]:
    """Returns (what meets the elements of values, what is added to all elements of the product
    [M, 1] or None).
    """
    if of_values is None:
        return p_MS.astype(static.dtype), None
    added = (
        None
        if of_values.offset is None
        else jnp.sum(p_MS * of_values.offset, axis=1, keepdims=True)
    )
    return (p_MS * of_values.scale).astype(static.dtype), added
