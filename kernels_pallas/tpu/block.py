"""What the attention kernels share: one block of pages as matmul operands, its scores, and what is known when compiling."""

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
    """What is known when compiling. `statistics`, `page_mass`: the optional outputs."""

    layout: Layout
    page_size: int
    block: int
    scale: float
    window: int | None
    queries: int
    softcap: float | None
    sinks: bool
    statistics: bool
    page_mass: bool
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


def scores(q_MX: jax.Array, k_SX: jax.Array, scale_1S: jax.Array | None, static: Static) -> jax.Array:
    """[M, S] float32 scores times log2(e): the kernels use exp2, which is one operation less than exp."""
    s = dot(q_MX, k_SX, (1, 1))
    if scale_1S is not None:
        s = s * scale_1S
    if static.softcap is None:
        return s * (static.scale * LOG2E)
    return jnp.tanh(s * (static.scale / static.softcap)) * (static.softcap * LOG2E)


def load(block: Any, row: int) -> tuple[jax.Array, jax.Array | None]:
    """Row `row` of all pages of a block [pages, C, S, X] as a matmul operand [slots, X], and its scale per slot.

    The place where a quantised codec goes: elements as they are stored, cast to what the matmul unit takes, and a scale
    [1, slots] (per token and head) that multiplies columns of the scores, or of the weights, never elements.
    """
    pages, _, size, width = block.shape
    return block[:, row].reshape(pages * size, width), None


def in_lanes(*columns_ML: jax.Array) -> jax.Array:
    """[M, LANES] with the i-th array's values in lane i, the last one's in all lanes from its own on."""
    *columns, out = (column[:, :LANES] for column in columns_ML)
    lane = jax.lax.broadcasted_iota(jnp.int32, out.shape, 1)
    for i, column in enumerate(columns):
        out = jnp.where(lane == i, column, out)
    return out
