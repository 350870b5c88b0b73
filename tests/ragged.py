"""Random ragged batches over paged memory, where all that no row holds is NaN, and what the oracle
says of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.kv.state import BEHIND
from kernels_pallas import gpu, reference
from kernels_pallas.tpu import Quantised

LAYER, NUM_LAYERS, WIDTH, NUM_ROWS = 1, 2, 6, 7
WINDOWS = (20, 2**30)
"""Of the KV groups whose schedules are stacked: one cuts every row, one sees all before it."""

WHOLE = {"bfloat16": 2e-3, "float32": 1e-5}
PER_HEAD = {"bfloat16": 5e-3, "float32": 1e-5}


@dataclass(frozen=True)
class Shape:
    num_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 128
    page_size: int = 16
    dtype: str = "bfloat16"
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    block: int = 2
    parts: int = 1
    """So many times `block` pages are a block of prefill."""
    heads: int | None = None
    decode_only: bool = False
    tables_in_hbm: bool = False
    num_bits: int | None = None
    """Of quantised keys and values."""


@dataclass
class Case:
    shape: Shape
    arrays: dict[str, np.ndarray]
    pages: np.ndarray
    held: np.ndarray
    row_T: np.ndarray
    position_T: np.ndarray
    dest_T: np.ndarray
    num_decode: int
    num_rows: int


def lengths(rng: np.random.Generator, size: int) -> np.ndarray:
    """0, 1, around page borders, around a block of two pages, and all that a row's table can
    hold.
    """
    border = [n + d for n in (size, 2 * size, 4 * size) for d in (-1, 0, 1)]
    return rng.choice([0, 1, *border, WIDTH * size - 1, WIDTH * size], NUM_ROWS)


def random_case(seed: int, shape: Shape, held: list[int] | None = None) -> Case:
    """Decode rows (one rests), then chunks, then rows that are not in the step; some rows have
    dropped pages. held: how many tokens each row holds, instead of `lengths`.
    """
    rng, size = np.random.default_rng(seed), shape.page_size
    len_B, count_B = lengths(rng, size), np.ones(NUM_ROWS, int)
    len_B = len_B if held is None else np.array(held)
    num_decode = NUM_ROWS if shape.decode_only else 3
    num_rows = NUM_ROWS if shape.decode_only else 6
    count_B[1], count_B[num_rows:] = 0, 0
    for row in range(num_decode, num_rows):
        len_B[row] = max(len_B[row], 1)
        count_B[row] = rng.integers(1, min(len_B[row], 40) + 1)
    count_B = np.minimum(count_B, len_B)
    start_B = np.arange(NUM_ROWS)
    start_B[num_decode:] = num_decode + np.cumsum(count_B[num_decode:]) - count_B[num_decode:]
    num_tokens = NUM_ROWS if shape.decode_only else 128
    num_pages = NUM_ROWS * WIDTH + 2
    table_BW = rng.permutation(num_pages)[: NUM_ROWS * WIDTH].reshape(NUM_ROWS, WIDTH)
    # Pages are dropped from what a row held before the step.
    drop_B = rng.integers(1, WIDTH, NUM_ROWS)
    drops = (np.arange(WIDTH)[None, :] >= drop_B[:, None]) & (
        (len_B - count_B >= drop_B * size)[:, None]
    )
    first_BW = (np.arange(WIDTH)[None, :] + 2 * drops) * size

    row_T, position_T = np.full(num_tokens, NUM_ROWS), np.zeros(num_tokens, int)
    dest_T = np.full(num_tokens, num_pages * size)
    is_held = np.zeros((num_pages, size), bool)
    for row in range(NUM_ROWS):
        slots = np.arange(len_B[row])
        is_held[table_BW[row, slots // size], slots % size] = True
        new, tokens = slots[len_B[row] - count_B[row] :], start_B[row] + np.arange(count_B[row])
        row_T[tokens], position_T[tokens] = row, first_BW[row, new // size] + new % size
        dest_T[tokens] = table_BW[row, new // size] * size + new % size
    pages = rng.normal(size=(num_pages, 2 * shape.kv_heads, size, shape.head_dim))
    pages.swapaxes(1, 2)[~is_held] = np.nan
    written = dest_T[dest_T < num_pages * size]
    pages.swapaxes(1, 2)[written // size, written % size] = np.nan
    pages = np.concatenate([np.full_like(pages, np.nan), pages])
    for row in range(NUM_ROWS):  # entries past the length: any valid id
        table_BW[row, -(-len_B[row] // size) :] = rng.integers(0, num_pages)
    heads = {"q_TNH": shape.num_heads, "k_TKH": shape.kv_heads, "v_TKH": shape.kv_heads}
    arrays = {name: rng.normal(size=(num_tokens, n, shape.head_dim)) for name, n in heads.items()}
    arrays = {name: np.asarray(jnp.asarray(x, shape.dtype)) for name, x in arrays.items()}
    integers = {
        "table_BW": table_BW,
        "first_BW": first_BW,
        "len_B": len_B,
        "start_B": start_B,
        "count_B": count_B,
    }
    arrays |= {name: x.astype(np.int32) for name, x in integers.items()}
    pages = np.asarray(jnp.asarray(pages, shape.dtype))
    return Case(shape, arrays, pages, is_held, row_T, position_T, dest_T, num_decode, num_rows)


def first_page_behind(case: Case) -> Case:
    """The case whose rows have lost their first page, where a step's own tokens are not in it: its
    column stays, with the position that is behind every window.
    """
    arrays = {name: np.copy(x) for name, x in case.arrays.items()}
    before = arrays["len_B"] - arrays["count_B"] >= case.shape.page_size
    arrays["first_BW"][before, 0] = BEHIND
    return replace(case, arrays=arrays)


def first_page_shared(case: Case) -> Case:
    """The case whose rows have the first page in common, where a step's own tokens are not in it."""
    arrays = {name: np.copy(x) for name, x in case.arrays.items()}
    before = arrays["len_B"] - arrays["count_B"] >= case.shape.page_size
    assert before.sum() > 1
    arrays["table_BW"][before, 0] = arrays["table_BW"][before, 0][0]
    return replace(case, arrays=arrays)


def sinks_of(shape: Shape) -> np.ndarray | None:
    return np.linspace(-1, 2, shape.num_heads).astype(np.float32) if shape.sinks else None


@partial(jax.jit, static_argnames=("shape", "num_pages"))
def _expected(shape, num_pages, q_TNH, k_TKH, v_TKH, pages, dest_T, tables, row_T, position_T):
    pages = reference.write_pages(pages, k_TKH, v_TKH, dest_T, layer=LAYER, num_pages=num_pages)
    out, _ = reference.ragged_paged_attention(
        q_TNH,
        pages,
        *tables,
        row_T,
        position_T,
        layer=LAYER,
        num_pages=num_pages,
        scale=shape.head_dim**-0.5,
        window=shape.window,
        softcap=shape.softcap,
        sinks_N=sinks_of(shape),
    )
    return out, pages


def expected(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Returns (out, pages) in float64, from the same rounded inputs."""
    arrays = case.arrays
    inputs = (*(arrays[name] for name in ("q_TNH", "k_TKH", "v_TKH")), case.pages)
    tables = tuple(arrays[name] for name in ("table_BW", "first_BW", "len_B"))
    data = case.dest_T, tables, case.row_T, case.position_T
    with jax.enable_x64(True):
        inputs = (np.asarray(x, np.float64) for x in inputs)
        out, pages = _expected(case.shape, len(case.held), *inputs, *data)
        return np.asarray(out), np.asarray(pages)


_write = jax.jit(partial(reference.write_pages, layer=LAYER), static_argnames="num_pages")


def written(case: Case) -> jax.Array:
    """The pages with the step's keys and values."""
    new = (case.arrays[name] for name in ("k_TKH", "v_TKH"))
    return _write(case.pages, *new, case.dest_T, num_pages=len(case.held))


def quantise(x: np.ndarray, num_bits: int) -> Quantised:
    """Vectors [..., H], NaN where nobody owns them: any whole numbers there, and NaN for a
    scale.
    """
    x = np.asarray(x, np.float32)
    rounded = lambda y: y.astype(jnp.bfloat16).astype(np.float32)  # noqa: E731
    if num_bits == 8:
        scale, offset = rounded(np.abs(x).max(axis=-1) / 127), None
        values = np.clip(np.round(x / scale[..., None]), -127, 127)
    else:
        scale, offset = rounded((x.max(-1) - x.min(-1)) / 15), rounded((x.max(-1) + x.min(-1)) / 2)
        values = np.clip(np.round((x - offset[..., None]) / scale[..., None] - 0.5), -8, 7)
    most = 1 << (num_bits - 1)
    anything = np.random.default_rng(7).integers(-most, most, x.shape)
    values = np.where(np.isnan(values), anything, values).astype(np.int8)
    return Quantised(*(None if y is None else jnp.asarray(y) for y in (values, scale, offset)))


def dequantise(x: Quantised, num_bits: int) -> np.ndarray:
    values = np.asarray(x.values, np.float32) + (0.0 if num_bits == 8 else 0.5)
    y = values * np.asarray(x.scale)[..., None]
    return y if x.offset is None else y + np.asarray(x.offset)[..., None]


def stands_for(case: Case) -> Case:
    """The case whose pages, keys and values are those that the shape's numbers stand for."""
    num_bits = case.shape.num_bits
    if num_bits is None:
        return case

    def decoded(x: np.ndarray) -> np.ndarray:
        return dequantise(quantise(x, num_bits), num_bits)

    arrays = case.arrays | {name: decoded(case.arrays[name]) for name in ("k_TKH", "v_TKH")}
    return replace(case, arrays=arrays, pages=decoded(case.pages))


def gpu_pages(case: Case) -> jax.Array | gpu.QuantisedPages:
    """The pages with the step's keys and values, as the GPU kernels take them."""
    pages, num_bits = written(case), case.shape.num_bits
    if num_bits is None:
        return pages
    numbers, scale, offset = quantise(np.asarray(pages), num_bits)
    scales = scale.astype(jnp.bfloat16) if offset is None else gpu.pack_scales(scale, offset)
    numbers = numbers if offset is None else gpu.pack_numbers(numbers)
    return gpu.QuantisedPages(numbers, scales.reshape(len(scales), 1, -1))


def assert_close(out_TNH: np.ndarray, want_TNH: np.ndarray, dtype: str) -> None:
    error, scale = (np.linalg.norm(x, axis=-1) for x in (out_TNH - want_TNH, want_TNH))
    assert np.linalg.norm(error) <= WHOLE[dtype] * np.linalg.norm(scale)
    assert (error <= PER_HEAD[dtype] * scale).all()
