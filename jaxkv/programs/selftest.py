"""Tries an attention kernel on the device that it is for: a small ragged batch, beside the XLA path
on the same device.

A batch has what goes wrong first: rows around the borders of pages and longer than the blocks of a
kernel, two rows that share a page while both write, rows that rest or hold nothing, gaps in
positions, and NaN in everything that no row holds.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.kv.codecs import Codec, PlainCodec
from jaxkv.kv.layout import PageLayout
from jaxkv.kv.state import PageTables, Store
from jaxkv.ops.attention import Backend, Batch, Heads, Place, Terms
from jaxkv.ops.attention.divided import on_one
from jaxkv.ops.attention.xla import Xla

LAYER, NUM_LAYERS = 1, 2
"""The layer that is tried, and of how many; nobody holds anything in the other one."""

WINDOW = 40
"""Tokens, at most, of the windows that are tried: one that cuts every longer row."""

WHOLE, PER_HEAD, STORED = 4e-3, 1e-2, 5e-2
"""Largest errors, as parts of the norm: of all outputs, of a head's output, and of a vector in a
quantised page. Twice what either side may be off the float64 oracle in `tests/ragged.py`; one
number of 4 bits that is rounded the other way is 0.03 of its vector.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Names what is tried: a kernel with the heads of one KV group on one device, and a batch as
    the decode loop makes it (`decode_only`) or one with prefill chunks. longest: tokens of its
    longest row.
    """

    heads: Heads
    codec: Codec
    page_size: int
    decode_only: bool
    longest: int

    def __str__(self) -> str:
        heads = self.heads
        parts = [f"{heads.num_heads}/{heads.num_kv_heads} heads of {heads.head_dim}"]
        if heads.latent_dim is not None:
            parts.append(f"latent {heads.latent_dim}")
        parts += [self.codec.name, f"pages of {self.page_size}"]
        if heads.window is not None:
            parts.append(f"window {heads.window}")
        if heads.cap:
            parts.append(f"cap {heads.cap:g}")
        if heads.has_sinks:
            parts.append("sinks")
        return f"{'decode' if self.decode_only else 'prefill'}, {', '.join(parts)}"


class Trial(NamedTuple):
    """Holds what came out: what is wrong, None if nothing is, and seconds of compiling and of one
    run.
    """

    fault: str | None
    compile_s: float
    run_s: float


class Rows(NamedTuple):
    """Holds a step's rows: what `PageTables` and `Batch` say, lengths before the step, and which
    slots [P, S] are held when it is over.
    """

    table_BW: np.ndarray
    first_BW: np.ndarray
    len_B: np.ndarray
    start_B: np.ndarray
    count_B: np.ndarray
    position_T: np.ndarray
    row_T: np.ndarray
    num_decode: int
    num_rows: int
    held_PS: np.ndarray


class Step(NamedTuple):
    """Holds what attention is given, beside the pages; no values where keys have them."""

    q_TNH: Any
    k_TKH: Any
    v_TKH: Any
    tables: PageTables
    batch: Batch


def cases_of(heads: Heads, codec: Codec, page_size: int, *, longest: int) -> list[Case]:
    """Returns both cases of a KV group, with a window that is short enough to be met."""
    if heads.window is not None:
        heads = replace(heads, window=min(heads.window, WINDOW))
    return [
        Case(
            heads=heads,
            codec=codec,
            page_size=page_size,
            decode_only=decode_only,
            longest=max(longest, 3 * page_size),
        )
        for decode_only in (True, False)
    ]


def try_case(case: Case, backend: Backend, device: jax.Device) -> Trial:
    """Attends the case by the backend and by XLA's path, and compares outputs and pages.

    Raises: whatever compiling or running the kernel meets.
    """
    rng = np.random.default_rng(0)
    rows = make_rows(case, rng)
    layout = backend.page_layout(case.heads, case.page_size, case.codec)
    # Both see vectors of the size that the kernel's pages have.
    heads = replace(case.heads, head_dim=layout.head_dim)
    step, vectors = _inputs(case, heads, rows, rng), _vectors(layout, rows, rng)
    wanted = _wanted(case, heads, layout, step, vectors, device)
    found, compile_s, run_s = _run(heads, layout, step, vectors, backend, device)
    return Trial(_compare(case, rows, wanted, found), compile_s, run_s)


def _wanted(
    case: Case,
    heads: Heads,
    layout: PageLayout,
    step: Step,
    vectors: np.ndarray,
    device: jax.Device,
) -> tuple[np.ndarray, ...]:
    """Returns what XLA finds. In place of quantised pages it has the vectors that those stand for:
    XLA's own quantised pages take a TPU's compiler minutes.
    """
    codec = case.codec
    if not isinstance(codec, PlainCodec):
        codec = PlainCodec(dtype="float32")
        vectors = np.asarray(jax.jit(partial(_stored, layout))(vectors))
        v_LTKH = None if step.v_TKH is None else step.v_TKH[None]
        arrays = layout.pack(step.k_TKH[None], v_LTKH)
        k, v = (np.asarray(x)[0, : len(step.k_TKH)] for x in layout.unpack(arrays))
        step = step._replace(k_TKH=k, v_TKH=None if v_LTKH is None else v)
    xla = Xla()
    stored = xla.page_layout(heads, case.page_size, codec)
    with jax.default_matmul_precision("highest"):  # a TPU's own is that of bfloat16
        found, *_ = _run(heads, stored, step, vectors, xla, device)
    return found


def _run(
    heads: Heads,
    layout: PageLayout,
    step: Step,
    vectors: np.ndarray,
    backend: Backend,
    device: jax.Device,
) -> tuple[tuple[np.ndarray, ...], float, float]:
    """Returns ((out, keys, values), seconds of compiling, seconds of the run)."""
    given = jax.device_put((step, _store(layout, vectors)), device)
    started = time.perf_counter()
    # What an interpreter runs is not worth optimising.
    quick: dict[str, str | bool] = {"xla_backend_optimization_level": "0"}
    attend = on_one(partial(_attend, backend=backend, heads=heads), backend.tokens_over, device)
    lowered = jax.jit(attend).lower(*given)
    program = lowered.compile(quick if device.platform == "cpu" else None)
    compiled = time.perf_counter()
    out_TNH, stored = jax.block_until_ready(program(*given))
    ended = time.perf_counter()
    found = (np.asarray(out_TNH), *map(np.asarray, stored))
    return found, compiled - started, ended - compiled


def _attend(
    step: Step, store: Store, *, backend: Backend, heads: Heads
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Returns (out, the keys and values [P * S, K, H] of all slots of the layer after the step)"""
    tables, batch = step.tables, step.batch
    prepared = backend.prepare(store, tables, batch, heads)
    after = replace(tables, len_B=tables.len_B + batch.count_B)
    sinks_N = jnp.linspace(-1.0, 2.0, heads.num_heads) if heads.has_sinks else None
    out_TNH, store, _ = backend.attend(
        step.q_TNH,
        step.k_TKH,
        step.v_TKH,
        Place(store, LAYER, after),
        batch,
        prepared,
        Terms(heads.head_dim**-0.5, np.dtype(np.float32), heads.cap, sinks_N),
    )
    of_layer = [x.reshape(NUM_LAYERS, -1, *x.shape[1:])[LAYER:] for x in store.arrays]
    k, v = store.layout.unpack(of_layer)
    return out_TNH, (k[0], v[0])


def make_rows(case: Case, rng: np.random.Generator) -> Rows:
    """Lists rows as (tokens before, tokens of the step, whether its first page is row 0's)."""
    size, longest = case.page_size, case.longest
    decode = [(2 * size, 1, False), (size + 4, 1, True), (size - 1, 1, False), (0, 1, False)]
    if case.decode_only:
        decode += [(longest - 1, 1, False), (3 * size - 2, 1, False)]
        decode += [(size + 1, 0, True), (0, 0, False)]
        chunks, others = [], []
    else:
        chunks = [(0, size + 7, False), (size + 3, 21, True), (longest - 30, 30, False)]
        chunks += [(size - 1, 2, False)]
        others = [(3, 0, False)]
    rows = decode + chunks + others
    before_B, count_B = (np.array([row[i] for row in rows]) for i in (0, 1))
    num_decode, num_rows = len(decode), len(decode) + len(chunks)
    start_B = np.arange(len(rows))
    start_B[num_decode:] = num_decode + np.cumsum(count_B[num_decode:]) - count_B[num_decode:]
    used = int(num_decode + count_B[num_decode:].sum())
    num_tokens = len(rows) if case.decode_only else 1 << used.bit_length()

    held_B = -(-(before_B + count_B) // size)
    num_pages = int(held_B.sum()) + 2
    pages = iter(rng.permutation(num_pages))
    table_BW = rng.integers(0, num_pages, (len(rows), max(held_B)))  # past a length: any
    first_BW = np.broadcast_to(np.arange(max(held_B)) * size, table_BW.shape).copy()
    first_BW[before_B + count_B == longest] += 2 * size  # as if two pages had been dropped
    held_PS = np.zeros((num_pages, size), bool)
    position_T, row_T = np.zeros(num_tokens, int), np.full(num_tokens, len(rows))
    for row, (before, count, shares) in enumerate(rows):
        table_BW[row, : held_B[row]] = [next(pages) for _ in range(held_B[row])]
        if shares:
            table_BW[row, 0] = table_BW[0, 0]
        slots = np.arange(before + count)
        held_PS[table_BW[row, slots // size], slots % size] = True
        new, tokens = slots[before:], start_B[row] + np.arange(count)
        position_T[tokens] = first_BW[row, new // size] + new % size
        row_T[tokens] = row
    return Rows(
        table_BW=table_BW.astype(np.int32),
        first_BW=first_BW.astype(np.int32),
        len_B=before_B.astype(np.int32),
        start_B=start_B.astype(np.int32),
        count_B=count_B.astype(np.int32),
        position_T=position_T.astype(np.int32),
        row_T=row_T.astype(np.int32),
        num_decode=num_decode,
        num_rows=num_rows,
        held_PS=held_PS,
    )


def _inputs(case: Case, heads: Heads, rows: Rows, rng: np.random.Generator) -> Step:
    num_tokens = len(rows.row_T)

    def vectors(count: int) -> np.ndarray:
        x = rng.normal(size=(num_tokens, count, heads.head_dim))
        return x.astype(jnp.bfloat16).astype(case.codec.dtype)

    of_step: Any = rows  # arrays of numpy, until the program has them
    batch = Batch(
        token_T=of_step.row_T,
        position_T=of_step.position_T,
        row_T=of_step.row_T,
        start_B=of_step.start_B,
        count_B=of_step.count_B,
        num_decode=jnp.int32(rows.num_decode),
        num_rows=jnp.int32(rows.num_rows),
        decode_only=case.decode_only,
    )
    k_TKH = vectors(heads.num_kv_heads)
    v_TKH = None if heads.latent_dim is not None else vectors(heads.num_kv_heads)
    tables = PageTables(of_step.table_BW, of_step.first_BW, of_step.len_B)
    return Step(vectors(heads.num_heads), k_TKH, v_TKH, tables, batch)


def _vectors(layout: PageLayout, rows: Rows, rng: np.random.Generator) -> np.ndarray:
    """Returns what is stored before the step, [L, P, V, S, H]: NaN where nobody holds anything, and
    where the step writes.
    """
    num_pages, size = rows.held_PS.shape
    some = rng.normal(size=(min(num_pages, 16), layout.num_vectors, size, layout.head_dim))
    x = some.astype(jnp.bfloat16).astype(np.float32)[np.arange(num_pages) % len(some)]
    held_PS = rows.held_PS.copy()
    for row, count in enumerate(rows.count_B):
        slots = rows.len_B[row] + np.arange(count)
        held_PS[rows.table_BW[row, slots // size], slots % size] = False
    x.swapaxes(1, 2)[~held_PS] = np.nan
    return np.stack([np.full_like(x, np.nan), x])


def _stored(layout: PageLayout, vectors: np.ndarray) -> jax.Array:
    """Returns the vectors that pages of these stand for."""
    return layout.decode(layout.encode(jnp.asarray(vectors[:, :, None])))[:, :, 0]


def _store(layout: PageLayout, vectors: np.ndarray) -> Store:
    arrays = jax.jit(layout.encode)(vectors[:, :, None])  # one device's
    pages, *scales = (x.reshape(-1, *x.shape[2:]) for x in arrays)
    return Store(pages, layout, NUM_LAYERS, *scales)


def _compare(
    case: Case, rows: Rows, wanted: tuple[np.ndarray, ...], found: tuple[np.ndarray, ...]
) -> str | None:
    """Says where pages or outputs are not XLA's."""
    exact = isinstance(case.codec, PlainCodec)
    size = case.page_size
    held = rows.held_PS.ravel()
    for name, want, got in zip(("keys", "values"), wanted[1:], found[1:], strict=True):
        bad = _error(got, want).max(axis=1) if not exact else (got != want).any(axis=(1, 2))
        bad = held & ~(bad <= STORED)
        if bad.any():
            slot = int(np.flatnonzero(bad)[0])
            return (
                f"{name} of {bad.sum()} of {held.sum()} slots that are held are not those that XLA "
                f"stores, the first in slot {slot % size} of page {slot // size}"
            )
    real_T = rows.row_T < len(rows.count_B)
    want_TNH, got_TNH = wanted[0][real_T], found[0][real_T]
    if not np.isfinite(want_TNH).all():
        return "XLA's own outputs are not all finite numbers"
    error_TN = _error(got_TNH, want_TNH)
    whole = float(np.linalg.norm(got_TNH - want_TNH) / np.linalg.norm(want_TNH))
    if error_TN.max() <= PER_HEAD and whole <= WHOLE:
        return None
    token, head = np.unravel_index(np.argmax(np.nan_to_num(error_TN, nan=np.inf)), error_TN.shape)
    row = rows.row_T[real_T][token]
    return (
        f"outputs are {whole:.2g} of their norm off XLA's, expected at most {WHOLE}; most, "
        f"{error_TN[token, head]:.2g} (at most {PER_HEAD}), in head {head} of the token at "
        f"position {rows.position_T[real_T][token]} of row {row}, which holds "
        f"{rows.len_B[row] + rows.count_B[row]} tokens"
    )


def _error(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Returns the error of each vector as a part of its norm."""
    norm = np.linalg.norm(want, axis=-1)
    return np.linalg.norm(got - want, axis=-1) / np.maximum(norm, 1e-30)
