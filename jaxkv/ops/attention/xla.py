"""Paged attention in plain XLA: runs on every device, fast on a CPU.

Decode rows are attended in tiles of neighbouring rows that sweep over page blocks together, prefill
chunks one (row, query block) at a time; each gathers its pages once per block and keeps a running
softmax (arXiv 2205.14135, algorithm 1), so that memory does not grow with the context and the trip
count is bounded by the longest row of the tile, without a recompilation. The scheduler lists decode
rows by length, so that rows of a tile are of like length.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.kv.codecs import Codec, Elements
from jaxkv.kv.layout import HeadMajorLayout, PageLayout
from jaxkv.kv.state import BEHIND, PageTables, Statistics, Store, destinations, write
from jaxkv.ops.attention.base import Attended, Batch, Heads, Needs, Place
from jaxkv.ops.attention.select import select_pages
from jaxkv.ops.attention.softmax import MASKED, Found, Rows, Softmax, Tally
from jaxkv.ops.layers import soft_cap, total

BLOCK = 128
"""Keys gathered per row and iteration, for decode rows and prefill chunks alike: both add up in the
same order.
"""

CPU_TILE_ROWS = 8
"""Decode rows that sweep together on a CPU: with BLOCK keys of each, what is gathered stays in the
cache.
"""

CPU_MIN_QUERIES = 2
"""Per KV head: XLA:CPU adds up the product of a vector and a matrix in another order than that of
two matrices.
"""

FLOAT32_VALUES = 64
"""Float32 values are padded to a multiple: XLA:CPU adds up the product of a few queries and other
widths in another order than that of many.
"""

QUERY_BLOCK = 64
"""Queries of one prefill work item: a chunk of fewer costs as much. With 128, 32 rows of 16 tokens
took 1.8 times as long, long prompts as long as with 64 (docs/benchmarks/cpu_choices.md).
"""

Window = int | jax.Array | None
"""How many tokens a query sees, itself included, or are in a chunk; None: all before it."""


class Scores(NamedTuple):
    """Says what becomes of scores: which keys are seen, and cap and sinks as in `Attention`, these
    by KV head.
    """

    window: Window
    chunk: Window
    cap: float
    sinks_KG: jax.Array | None

    def reach(self, position: jax.Array) -> Window:
        """Returns how many tokens queries at these positions see at most, themselves included: one
        number for all, or an array like `position`.
        """
        if self.chunk is None:
            return self.window
        own = position % self.chunk + 1
        return own if self.window is None else jnp.minimum(own, self.window)

    def seen(
        self, position_RM: jax.Array, key_position_RKJ: jax.Array, held_RKJ: jax.Array
    ) -> jax.Array:
        """Returns which keys, of those that are held, each query sees, [R, K, M, J]."""
        position_RKMJ = position_RM[:, None, :, None]
        distance_RKMJ = position_RKMJ - key_position_RKJ[:, :, None, :]
        seen_RKMJ = held_RKJ[:, :, None, :] & (distance_RKMJ >= 0)
        if (reach := self.reach(position_RKMJ)) is not None:
            seen_RKMJ &= distance_RKMJ < reach
        return seen_RKMJ


@dataclass(frozen=True, slots=True)
class Xla:
    """See `base.Backend`. `deterministic`: as in `read`."""

    # Blocks of keys must not begin elsewhere, or a query would add up in another order.
    aligned_len: ClassVar[int] = BLOCK
    deterministic: bool = False

    def refuses(self, heads: Heads, needs: Needs) -> str | None:
        return None

    def page_layout(self, heads: Heads, page_size: int, codec: Codec) -> HeadMajorLayout:
        return HeadMajorLayout(
            num_kv_heads=heads.num_kv_heads,
            head_dim=heads.head_dim,
            page_size=page_size,
            codec=codec,
            latent_dim=heads.latent_dim,
        )

    def prepare(
        self, store: Store, tables: PageTables, batch: Batch, heads: Heads
    ) -> tuple[jax.Array, Window, Window]:
        start_T = batch.start_B.at[batch.row_T].get(mode="fill", fill_value=0)
        offset_T = jnp.arange(batch.token_T.shape[0], dtype=jnp.int32) - start_T
        dest_T = destinations(store, tables, row_T=batch.row_T, offset_T=offset_T)
        return dest_T, heads.window, heads.chunk

    def attend(
        self,
        q_TNH: jax.Array,
        k_TKH: jax.Array | None,
        v_TKH: jax.Array | None,
        at: Place,
        batch: Batch,
        prepared: tuple[jax.Array, Window, Window],
        *,
        scale: float,
        out_dtype: np.dtype,
        cap: float = 0.0,
        sinks_N: jax.Array | None = None,
    ) -> Attended:
        dest_T, window, chunk = prepared
        store = at.store
        if k_TKH is not None:
            store = write(store, k_TKH, v_TKH, dest_T=dest_T, layer=at.layer)
        out_TNH, statistics = read(
            q_TNH,
            at._replace(store=store),
            batch,
            scale=scale,
            window=window,
            chunk=chunk,
            cap=cap,
            sinks_N=sinks_N,
            deterministic=self.deterministic,
        )
        return Attended(out_TNH, store, statistics)


def read(
    q_TNH: jax.Array,
    at: Place,
    batch: Batch,
    *,
    scale: float,
    window: Window,
    chunk: Window = None,
    cap: float = 0.0,
    sinks_N: jax.Array | None = None,
    deterministic: bool = False,
) -> tuple[jax.Array, Statistics | None]:
    """Attends over pages that have the step's keys and values, `at.tables.len_B` its tokens, and
    over those of `at.store.low`. Returns [T, N, H] float32, as wide as values are, and
    `at.statistics` with this layer's added.

    `deterministic`: on a CPU, a query gets the same bits in a decode row as in a prefill chunk.
    """
    num_rows, codec = at.tables.table_BW.shape[0], at.store.codec
    q_TNH = codec.rotate(q_TNH.astype(jnp.float32) * scale)
    is_decode_B = (jnp.arange(num_rows) < batch.num_decode) & (batch.count_B > 0)
    sinks_KG = None if sinks_N is None else sinks_N.reshape(at.store.num_kv_heads, -1)
    asked = Scores(window, chunk, cap, sinks_KG)
    decode = partial(_decode, asked=asked)
    decoded, statistics = jax.lax.platform_dependent(
        q_TNH[:num_rows],
        at,
        batch.position_T[:num_rows],
        is_decode_B,
        # XLA:CPU is faster at these tiny matmuls in float32, whatever the pages hold.
        cpu=partial(
            decode,
            tile_rows=CPU_TILE_ROWS,
            min_queries=CPU_MIN_QUERIES,
            in_float32=not deterministic,
        ),
        default=partial(decode, tile_rows=num_rows, min_queries=1, in_float32=False),
    )
    out_TNH = decoded
    if not batch.decode_only:
        at = at._replace(statistics=statistics)
        out_TNH, statistics = _prefill(q_TNH, decoded, at, batch, asked=asked)
    # A codec may have rotated a key as a whole: only now do its first numbers stand apart.
    return codec.restore(out_TNH)[..., : at.store.layout.latent_dim], statistics


def _decode(
    q_BNH: jax.Array,
    at: Place,
    position_B: jax.Array,
    live_B: jax.Array,
    *,
    tile_rows: int,
    min_queries: int,
    in_float32: bool,
    asked: Scores,
) -> tuple[jax.Array, Statistics | None]:
    """Attends one query per row, `tile_rows` rows side by side, with at least `min_queries` queries
    per KV head.
    """
    num_rows, num_heads, head_dim = q_BNH.shape
    heads, size = at.store.num_kv_heads, min(tile_rows, num_rows)
    per_head = num_heads // heads
    q_BKGH = q_BNH.reshape(num_rows, heads, per_head, head_dim)
    q_BKGH = jnp.pad(q_BKGH, ((0, 0), (0, 0), (0, max(0, min_queries - per_head)), (0, 0)))
    tables = at.tables
    len_B = jnp.where(live_B, tables.len_B, 0)
    reach = asked.reach(position_B)
    first_B = jnp.zeros_like(len_B) if reach is None else jnp.maximum(len_B - reach, 0)
    first_B = jnp.where(live_B, first_B, jnp.iinfo(jnp.int32).max)

    def tile(
        i: jax.Array, carry: tuple[jax.Array, Statistics | None]
    ) -> tuple[jax.Array, Statistics | None]:
        # The last tile starts early rather than end late: rows computed twice come out the same.
        out_BNH, statistics = carry
        start = jnp.minimum(i * size, num_rows - size)
        take = partial(jax.lax.dynamic_slice_in_dim, start_index=start, slice_size=size)
        position_R, len_R = take(position_B), take(len_B)
        rows, bounds = jax.tree.map(take, every_row), (jnp.min(take(first_B)), jnp.max(len_R))
        if at.store.num_read is not None:
            rows = select_pages(take(q_BKGH), at.store, rows, layer=at.layer)
            width = rows.table_RKW.shape[2] * at.store.page_size
            bounds = jnp.int32(0), jnp.minimum(bounds[1], width)
        out, found = _attend(
            take(q_BKGH),
            at,
            rows,
            position_R[:, None],
            bounds,
            in_float32=in_float32,
            asked=asked,
        )
        if statistics is not None and found is not None and tables.since_B is not None:
            counts_R = take(live_B) & (position_R >= take(tables.since_B))
            real_M = jnp.arange(q_BKGH.shape[2]) < per_head
            new = found.counted(counts_R[:, None] & real_M[None], statistics)
            old = jax.tree.map(take, before)
            statistics = jax.tree.map(
                lambda all_B, old_R, new_R: jax.lax.dynamic_update_slice_in_dim(
                    all_B, old_R + new_R, start, 0
                ),
                statistics,
                old,
                new,
            )
        out = out[:, :, :per_head].reshape(size, num_heads, head_dim)
        return jax.lax.dynamic_update_slice_in_dim(out_BNH, out, start, 0), statistics

    before = at.statistics
    every_row = _rows_of(at.store, replace(tables, len_B=len_B), asked.window)
    return jax.lax.fori_loop(0, -(-num_rows // size), tile, (jnp.zeros_like(q_BNH), before))


def _prefill(
    q_TNH: jax.Array,
    out_TNH: jax.Array,
    at: Place,
    batch: Batch,
    *,
    asked: Scores,
) -> tuple[jax.Array, Statistics | None]:
    """Attends every prefill row's chunk, QUERY_BLOCK queries at a time, written over `out` (which
    holds the decode rows).
    """
    num_tokens, num_heads, head_dim = q_TNH.shape
    heads, size = at.store.num_kv_heads, min(QUERY_BLOCK, num_tokens)
    per_head = num_heads // heads
    # Blocks may run past their row's end, and are then overwritten by the next row, or lie in this
    # extra block.
    q_TNH = jnp.pad(q_TNH, ((0, size), (0, 0), (0, 0)))
    position_T = jnp.pad(batch.position_T, (0, size))
    out_TNH = jnp.pad(out_TNH, ((0, num_tokens + size - out_TNH.shape[0]), (0, 0), (0, 0)))
    rows, tables = _rows_of(at.store, at.tables, asked.window), at.tables

    def block(
        row: jax.Array, done: jax.Array, carry: tuple[jax.Array, Statistics | None]
    ) -> tuple[Any, Any]:
        out_TNH, statistics = carry
        start = batch.start_B[row] + done
        q = jax.lax.dynamic_slice_in_dim(q_TNH, start, size)
        position = jax.lax.dynamic_slice_in_dim(position_T, start, size)
        # [T, K, G, H] -> [1, K, T*G, H]: all queries that share a KV head meet its keys in one
        # matmul.
        q = (
            q.reshape(size, heads, per_head, head_dim)
            .transpose(1, 0, 2, 3)
            .reshape(1, heads, -1, head_dim)
        )
        length = tables.len_B[row]
        index = length - batch.count_B[row] + done
        reach = asked.reach(position[0])
        low = jnp.int32(0) if reach is None else jnp.maximum(index + 1 - reach, 0)
        take_row = partial(jax.lax.dynamic_slice_in_dim, start_index=row, slice_size=1)
        out, found = _attend(
            q,
            at,
            jax.tree.map(take_row, rows),
            jnp.repeat(position, per_head)[None, :],
            (low, jnp.minimum(index + size, length)),
            in_float32=False,
            asked=asked,
        )
        if statistics is not None and found is not None and tables.since_B is not None:
            counts_T = (done + jnp.arange(size) < batch.count_B[row]) & (
                position >= tables.since_B[row]
            )
            new = found.counted(jnp.repeat(counts_T, per_head)[None], statistics)
            statistics = jax.tree.map(
                lambda all_B, new_1: all_B.at[row].add(new_1[0]), statistics, new
            )
        out = (
            out.reshape(heads, size, per_head, head_dim)
            .transpose(1, 0, 2, 3)
            .reshape(size, num_heads, head_dim)
        )
        return jax.lax.dynamic_update_slice_in_dim(out_TNH, out, start, 0), statistics

    def row_step(row: jax.Array, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        num_blocks = (batch.count_B[row] + size - 1) // size
        return jax.lax.fori_loop(0, num_blocks, lambda i, carry: block(row, i * size, carry), carry)

    carry = (out_TNH, at.statistics)
    out_TNH, statistics = jax.lax.fori_loop(batch.num_decode, batch.num_rows, row_step, carry)
    return out_TNH[:num_tokens], statistics


def _rows_of(store: Store, tables: PageTables, window: Window) -> Rows:
    low = None
    if store.low is not None and tables.low is not None:
        low = _rows_of(store.low, tables.low, None)
    table_BW, first_BW = jnp.asarray(tables.table_BW), jnp.asarray(tables.first_BW)
    begin_W = jnp.arange(table_BW.shape[1], dtype=jnp.int32) * store.page_size
    held_BW = jnp.clip(tables.len_B[:, None] - begin_W[None], 0, store.page_size)
    if window is not None:
        held_BW = jnp.where(first_BW == BEHIND, 0, held_BW)
    return Rows(table_BW[:, None], first_BW[:, None], held_BW[:, None], low)


def _attend(
    q_RKMH: jax.Array,
    at: Place,
    rows: Rows,
    position_RM: jax.Array,
    bounds: tuple[jax.Array, jax.Array],
    *,
    in_float32: bool,
    asked: Scores,
) -> tuple[jax.Array, Found | None]:
    """Sweeps over the pages of both pools. Returns [R, K, M, H], and what `at.statistics` wants.

    The M queries of a KV head are of its G heads by turns: query m of head m mod G.
    """
    sweep = partial(_sweep, in_float32=in_float32, asked=asked)
    softmax, own = sweep(q_RKMH, at, rows, position_RM, bounds)
    low, of_low = at.store.low, None
    if low is not None and rows.low is not None:
        # The store's own codec rotates nothing (`kv.policies`).
        codec, all_slots = low.codec, (jnp.int32(0), jnp.max(rows.low.held_RKW.sum(axis=2)))
        at_low = at._replace(store=low)
        found, of_low = sweep(codec.rotate(q_RKMH), at_low, rows.low, position_RM, all_slots)
        softmax = softmax.merged(found._replace(acc=codec.restore(found.acc)))
    if asked.sinks_KG is not None:
        softmax = softmax.merged(_sinks(asked.sinks_KG, softmax))
    return softmax.result(), None if own is None else Found(softmax, own, of_low)


def _sinks(sinks_KG: jax.Array, like: Softmax) -> Softmax:
    """Returns the softmax over a key of value 0 that every query of a head sees with the head's
    score. Source: arXiv 2309.17453, section 3.3, as gpt-oss learns them.
    """
    num_rows, heads, queries = like.max.shape
    sinks_KG = sinks_KG.astype(jnp.float32)
    score_KM = jnp.tile(sinks_KG, (1, -(-queries // sinks_KG.shape[1])))[:, :queries]
    score_RKM = jnp.broadcast_to(score_KM, (num_rows, heads, queries))
    zeros = jnp.zeros_like(like.acc)
    entropy = None if like.entropy is None else zeros[..., 0]
    return Softmax(score_RKM, jnp.ones_like(like.sum), zeros, entropy)


def _sweep(
    q_RKMH: jax.Array,
    at: Place,
    rows: Rows,
    position_RM: jax.Array,
    bounds: tuple[jax.Array, jax.Array],
    *,
    in_float32: bool,
    asked: Scores,
) -> tuple[Softmax, Tally | None]:
    """Attends M queries per KV head of R rows over slots bounds[0]..bounds[1]-1 of their tables,
    counted as if all pages were full, BLOCK of them (or one page) at a time.

    Both matmuls take their inputs in the dtype that the pages decode to, or float32, and add up in
    float32. Blocks begin at multiples of their size, and one without a seen key changes no bit:
    what a query gets does not depend on the bounds.

    position_RM has the position of each query, or [R, 1] where all queries of a row share it.
    """
    num_rows, heads, _, head_dim = q_RKMH.shape
    store, wanted = at.store, at.statistics
    size, page_rows = store.page_size, store.pages.shape[1]
    per_block = max(1, BLOCK // size)
    width = rows.table_RKW.shape[2]
    padded = [jnp.pad(x, ((0, 0), (0, 0), (0, -width % per_block))) for x in rows[:3]]
    by_head = store.pages.reshape(-1, size, store.pages.shape[3])
    layer_base = at.layer * store.num_pages * page_rows
    key_1K1, to_values = _rows_of_heads(store.layout)
    slot_S = jnp.arange(size, dtype=jnp.int32)
    is_float32 = in_float32 or store.codec.dtype == "float32"
    padding = -head_dim % FLOAT32_VALUES if is_float32 else 0
    # XLA:CPU would compute masks and indices anew for each element of whatever reads them.
    once = jax.lax.optimization_barrier

    def fetch(head_page_RKC: jax.Array) -> Elements:
        """Gathers [R, K, C*S, H]: contiguous pieces of S vectors, already in the order that the
        matmul reads.
        """
        stored = (
            by_head.at[head_page_RKC]
            .get(mode="clip")
            .reshape(num_rows, heads, per_block * size, -1)
        )
        found = store.codec.elements(stored)
        return found._replace(values=found.values.astype(jnp.float32)) if in_float32 else found

    def body(i: jax.Array, carry: tuple[Softmax, Tally | None]) -> tuple[Softmax, Tally | None]:
        state, tally = carry
        take = partial(
            jax.lax.dynamic_slice_in_dim, start_index=i * per_block, slice_size=per_block, axis=2
        )
        page_RKC, first_RKC, in_page_RKC = map(take, padded)
        slot_1J = jnp.tile(slot_S, per_block)[None, None]
        held_RKJ = once(slot_1J < jnp.repeat(in_page_RKC, size, axis=2))
        key_position_RKJ = once(jnp.repeat(first_RKC, size, axis=2) + slot_1J)
        seen_RKMJ = once(asked.seen(position_RM, key_position_RKJ, held_RKJ))
        index_RKC = once(layer_base + page_RKC * page_rows + key_1K1)
        keys = fetch(index_RKC)
        values = fetch(once(index_RKC + to_values)) if to_values else keys
        # 0 x NaN is NaN: what nobody holds must be cleared from the values, masking the scores is
        # not enough.
        cleared = jnp.where(held_RKJ[..., None], values.values, 0)
        of_slot = (None if x is None else jnp.where(held_RKJ, x, 0.0) for x in values[1:])
        values = Elements(jnp.pad(cleared, ((0, 0), (0, 0), (0, 0), (0, padding))), *of_slot)
        state, weight = _accumulate(state, q_RKMH, keys, values, seen_RKMJ, asked.cap)
        if tally is not None:
            tally = tally.with_block(i, weight, state.max, seen_RKMJ[:, 0])
        return state, tally

    low, high = bounds
    block = per_block * size
    num_blocks = padded[0].shape[2] // per_block
    found = (
        Tally.empty((num_blocks, *q_RKMH.shape[:-1], per_block), position_RM)
        if wanted is not None
        else None
    )
    entropy = wanted is not None and wanted.entropy_B is not None
    empty = Softmax.empty(*q_RKMH.shape[:-1], head_dim + padding, entropy=entropy)
    state, found = jax.lax.fori_loop(
        low // block, (high + block - 1) // block, body, (empty, found)
    )
    return state._replace(acc=state.acc[..., :head_dim]), found


def _rows_of_heads(layout: PageLayout) -> tuple[jax.Array, int]:
    """Returns which rows of a page are each KV head's keys, [1, K, 1], and how many rows later its
    values are.
    """
    if not isinstance(layout, HeadMajorLayout):
        raise TypeError(f"expected pages that XLA can read head by head, got {layout}")
    keys, values = layout.keys, layout.values
    key_K = jnp.arange(keys.start, keys.stop, dtype=jnp.int32)
    return key_K[None, :, None], values.start - keys.start


def _accumulate(
    state: Softmax, q: jax.Array, keys: Elements, values: Elements, seen: jax.Array, cap: float
) -> tuple[Softmax, jax.Array]:
    """Adds one block of keys and values [R, K, J, H] into the running softmax of queries [R, K, M,
    H]. Returns the weights [R, K, M, J] too.

    Queries and weights are rounded to the dtype of keys and values. Of quantised ones the scales
    act on columns of scores and on weights, the offsets on the sums of both.
    """
    dtype = keys.values.dtype
    matmul = partial(
        jnp.einsum,
        precision=jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
    q = q.astype(dtype)
    scores = matmul("rkmh,rkjh->rkmj", q, keys.values)
    if keys.scale is not None:
        scores *= keys.scale[:, :, None]
    if keys.offset is not None:
        scores += total(q.astype(jnp.float32))[..., None] * keys.offset[:, :, None]
    if cap:
        scores = soft_cap(scores, cap)
    scores = jnp.where(seen, scores, MASKED)
    top = jnp.maximum(state.max, scores.max(axis=-1))
    # What is not seen gets weight 0, also where nothing is and the largest score is MASKED itself.
    weight = jnp.exp(scores - jnp.maximum(top, MASKED / 2)[..., None])
    # XLA:CPU would compute the exponentials anew for each of their sums.
    weight = jax.lax.optimization_barrier(weight)
    shrink = jnp.exp(state.max - top)
    scaled = weight if values.scale is None else weight * values.scale[:, :, None]
    gained = matmul("rkmj,rkjh->rkmh", scaled.astype(dtype), values.values)
    if values.offset is not None:
        gained += total(weight * values.offset[:, :, None])[..., None]
    entropy = None
    if state.entropy is not None:
        # What is not seen has weight 0 and a finite score.
        gained_entropy = total(weight * (scores - top[..., None]))
        entropy = shrink * (state.entropy + state.sum * (state.max - top)) + gained_entropy
    return Softmax(
        top, state.sum * shrink + total(weight), state.acc * shrink[..., None] + gained, entropy
    ), weight
