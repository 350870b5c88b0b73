"""What the attention kernels share: a block of pages as matmul operands, its scores, what is known when compiling."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from kernels_pallas.tpu.layout import LANES, Layout

MASKED = -1e30
"""Score of a slot that is not seen: finite, so that a row that saw nothing yet gives no NaN."""

LOG2E = math.log2(math.e)
SUBLANES = 8
VMEM_BYTES = 60 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Static:
    """What is known when compiling. block: pages; heads: rows of heads that decode works on without a loop; queries:
    tokens of a prefill block; the rest: `attention`."""

    layout: Layout
    page_size: int
    block: int
    heads: int
    queries: int
    scale: float
    window: int | None
    softcap: float | None
    sinks: bool
    statistics: bool
    page_mass: bool
    streamed: bool
    wait_by_page: bool
    """One wait for each page rather than one for all: the plain interpreter knows no copies of traced size."""

    @property
    def slots(self) -> int:
        return self.block * self.page_size


def div(a: jax.Array, b: int) -> jax.Array:
    """Of numbers that are not negative; `//` also handles the others, which costs scalar operations."""
    return jax.lax.div(a, jnp.int32(b))


def dot(a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
    dimensions = (((contract[0],), (contract[1],)), ((), ()))
    precision = jax.lax.Precision.HIGHEST if b.dtype == jnp.float32 else None
    return jax.lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=jnp.float32)


def elements(block: Any, row: int | jax.Array) -> jax.Array:
    """Row `row` of all pages of a block [pages, C, S, X], as a matmul operand [slots, X].

    With `slot_scale` the place where a quantised codec goes: this one gives elements as they are stored, cast to what
    the matmul unit takes, that one their scale per token and head.
    """
    pages, _, size, width = block.shape
    return block[:, row].reshape(pages * size, width)


def slot_scale(block: Any, row: int | jax.Array) -> jax.Array | None:
    """[1, slots]: multiplies columns of the scores (keys) or weights (values), never elements. None: all are 1."""
    del block, row
    return None


def scaled(x_MS: jax.Array, scale_1S: jax.Array | None) -> jax.Array:
    return x_MS if scale_1S is None else x_MS * scale_1S


def scores(q_MX: jax.Array, block: Any, row: int | jax.Array, static: Static) -> jax.Array:
    """[M, slots] float32: scaled (and capped) scores times log2(e). exp2 is one operation less than exp."""
    s = scaled(dot(q_MX, elements(block, row), (1, 1)), slot_scale(block, row))
    if static.softcap is None:
        return s * (static.scale * LOG2E)
    return jnp.tanh(s * (static.scale / static.softcap)) * (static.softcap * LOG2E)


def in_lanes(*columns_ML: jax.Array) -> jax.Array:
    """[M, LANES] with the i-th array's values in lane i, the last one's in all lanes from its own on."""
    *columns, out = (column[:, :LANES] for column in columns_ML)
    lane = jax.lax.broadcasted_iota(jnp.int32, out.shape, 1)
    for i, column in enumerate(columns):
        out = jnp.where(lane == i, column, out)
    return out
