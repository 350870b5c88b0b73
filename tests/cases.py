"""Random batches over pages in a codec, where everything that no row holds is NaN."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.holding.allocator import KVHandle
from jaxkv.kv.codecs import Codec, get_codec
from jaxkv.kv.codecs import decode as decode_
from jaxkv.kv.layout import HeadMajorLayout, PageLayout
from jaxkv.kv.state import PageTables, Statistics, Store
from jaxkv.ops.attention import Batch, Place
from poison import nan_of

NUM_LAYERS = 2
TOLERANCE = 5e-6
"""Outputs are averages of values near 1; float32 scores of up to 6 are off by some 6 x 6e-8 x
sqrt(H).
"""

AS_USERS = {
    "xla_backend_optimization_level": "3",
    "xla_llvm_disable_expensive_passes": "False",
}
"""Compiler options of programs whose bits are compared, in a module of `quick_compile`."""

MAX_LEN, NUM_ROWS = 560, 9  # five blocks of 128 keys, two tiles of rows


class Shape(NamedTuple):
    page_size: int
    window: int | None
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str


class Case(NamedTuple):
    q_TNH: np.ndarray
    store: Store
    tables: PageTables
    batch: Batch

    def at(self, layer: int, statistics: Statistics | None = None) -> Place:
        """Where this layer keeps its keys and values, and what rows have observed before it."""
        return Place(self.store, layer, self.tables, statistics)


@partial(jax.jit, static_argnums=0)
def encode(codec: Codec, x: jax.Array) -> jax.Array:
    """What is stored of vectors. In one program, where each operation would be one."""
    return codec.encode(x)


@partial(jax.jit, static_argnums=0)
def decode(codec: Codec, stored: jax.Array) -> jax.Array:
    """What comes back. In a program of its own: what is stored has been rounded, whatever the
    compiler might keep.
    """
    return decode_(codec, stored)


@partial(jax.jit, static_argnums=0)
def unpack(layout: PageLayout, arrays: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
    return layout.unpack(arrays)


def contents(store: Store) -> np.ndarray:
    """The keys and the values of every slot of the pool, [2, L, P, S, K, H] float64 (NaN stays
    NaN).
    """
    lead = (store.num_layers, store.num_pages)
    arrays = [x.reshape(*lead, *x.shape[1:]) for x in store.arrays]
    x = np.stack(unpack(store.layout, arrays)).astype(np.float64)
    return x.reshape(2, *lead, store.page_size, *x.shape[3:])


def only_layer(store: Store, layer: int) -> Store:
    """The store with NaN in every other layer."""
    keep = np.repeat(np.arange(NUM_LAYERS) == layer, store.num_pages)
    nan = nan_of(np.dtype(store.pages.dtype))
    return replace(store, pages=np.where(keep[:, None, None, None], store.pages, nan))


def held(store: Store, handle: KVHandle, length: int | None = None) -> np.ndarray:
    """The keys and the values of the handle's first tokens, [2, L, T, K, H] float64."""
    slots = np.arange(handle.length if length is None else length)
    page, slot = np.array(handle.pages, int)[slots // store.page_size], slots % store.page_size
    return contents(store)[:, :, page, slot]


def random_layout(
    rng: np.random.Generator, shape: Shape, len_B: np.ndarray
) -> tuple[np.ndarray, ...]:
    """(table_BW, first_BW, owned_PS): permuted page ids, some rows with dropped pages, two rows
    that share a page.
    """
    size, width = shape.page_size, -(-MAX_LEN // shape.page_size)
    num_pages = len(len_B) * width + 3
    table_BW = (
        rng.permutation(num_pages)[: len(len_B) * width].reshape(len(len_B), width).astype(np.int32)
    )
    if min(len_B[:2]) >= size:
        table_BW[1, 0] = table_BW[0, 0]
    dropped_BW = np.cumsum(rng.random(table_BW.shape) < 0.1, axis=1) * (
        rng.random((len(len_B), 1)) < 0.5
    )
    first_BW = ((np.arange(width) + dropped_BW) * size).astype(np.int32)
    owned_PS = np.zeros((num_pages, size), bool)
    for row, length in enumerate(len_B):
        for w in range(-(-length // size)):
            owned_PS[table_BW[row, w], : length - w * size] = True
    for row, length in enumerate(len_B):  # entries past the length: any valid id
        held = -(-length // size)
        table_BW[row, held:] = rng.integers(0, num_pages, width - held)
    return table_BW, first_BW, owned_PS


def random_case(
    rng: np.random.Generator, shape: Shape, len_B: np.ndarray, count_B: np.ndarray, **batch
) -> Case:
    """Rows of `len_B` held tokens, of which the last `count_B` are this step's; everything not held
    is NaN.
    """
    table_BW, first_BW, owned_PS = random_layout(rng, shape, len_B)
    codec = get_codec(shape.dtype, platform="cpu", dtype="float32")
    pages = rng.normal(
        size=(NUM_LAYERS, len(owned_PS), 2 * shape.num_kv_heads, shape.page_size, shape.head_dim)
    )
    stored = np.array(encode(codec, pages.astype(np.float32)))
    stored.swapaxes(2, 3)[:, ~owned_PS] = nan_of(stored.dtype)
    store = Store(
        pages=jnp.asarray(stored.reshape(-1, *stored.shape[2:])),
        layout=HeadMajorLayout(
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            page_size=shape.page_size,
            codec=codec,
        ),
        num_layers=NUM_LAYERS,
    )
    tables = PageTables(table_BW, first_BW, len_B.astype(np.int32))
    num_tokens = batch.pop("num_tokens")
    position_T, row_T = np.zeros(num_tokens, np.int32), np.full(num_tokens, len(len_B), np.int32)
    start_B = batch.pop("start_B")
    for row, (start, count, length) in enumerate(zip(start_B, count_B, len_B, strict=True)):
        slots = np.arange(length - count, length)
        position_T[start : start + count] = (
            first_BW[row, slots // shape.page_size] + slots % shape.page_size
        )
        row_T[start : start + count] = row
    made = Batch(
        token_T=np.zeros(num_tokens, np.int32),
        position_T=position_T,
        row_T=row_T,
        start_B=start_B.astype(np.int32),
        count_B=count_B.astype(np.int32),
        **batch,
    )
    q_TNH = (
        rng.normal(size=(num_tokens, shape.num_heads, shape.head_dim))
        .astype(jnp.bfloat16)
        .astype(np.float32)
    )
    return Case(q_TNH, store, tables, made)


def border_lengths(page_size: int) -> list[int]:
    """Around page borders and around the borders of blocks of 128 keys."""
    around = {page_size, 2 * page_size, 128, 256, 512, MAX_LEN}
    return sorted(
        {1}
        | {n for border in around for n in (border - 1, border, border + 1) if 1 <= n <= MAX_LEN}
    )


def step_case(seed: int, shape: Shape, *, num_tokens: int) -> Case:
    """3 rows of one token, longer prefill chunks until the tokens are used up, resting rows."""
    rng = np.random.default_rng(seed)
    len_B = rng.choice(border_lengths(shape.page_size), NUM_ROWS)
    len_B[3:] = np.maximum(len_B[3:], 2)
    count_B = np.ones(NUM_ROWS, int)
    left, rows = num_tokens - 3 - rng.integers(0, 5), 3
    if seed == 2 and shape.window:  # the first query sees just the last key of a block of 128
        len_B[3] = 127 + shape.window + 4
    while left > 1 and rows < NUM_ROWS - 1:
        whole = rng.random() < 0.5
        count_B[rows] = min(left, len_B[rows] if whole else rng.integers(2, len_B[rows] + 1))
        count_B[rows] = 5 if seed == 2 and shape.window and rows == 3 else count_B[rows]
        left -= count_B[rows]
        rows += 1
    len_B[rows:], count_B[rows:] = 0, 0
    start_B = np.where(count_B > 0, np.cumsum(count_B) - count_B, 0)
    scalars = {"num_decode": np.int32(3), "num_rows": np.int32(rows)}
    return random_case(
        rng, shape, len_B, count_B, num_tokens=num_tokens, start_B=start_B, **scalars
    )


def decode_case(seed: int, shape: Shape) -> Case:
    """A batch as the decode loop makes it: one token per row, some rows resting on what they
    hold.
    """
    rng = np.random.default_rng(seed)
    len_B = rng.choice(border_lengths(shape.page_size), NUM_ROWS)
    if seed == 2 and shape.window:  # all windows begin at the last key of a block of 128
        len_B[:] = 127 + shape.window
    count_B = (np.arange(NUM_ROWS) % 3 != 1).astype(int)
    len_B[4] = 0  # resting, and holding nothing
    scalars = {
        "num_decode": np.int32(NUM_ROWS),
        "num_rows": np.int32(NUM_ROWS),
        "decode_only": True,
    }
    return random_case(
        rng, shape, len_B, count_B, num_tokens=NUM_ROWS, start_B=np.arange(NUM_ROWS), **scalars
    )


def scale_of(case: Case) -> float:
    return case.q_TNH.shape[2] ** -0.5
