"""Paged attention in plain XLA: runs on every device, fast on a CPU.

Decode rows are attended in tiles of neighbouring rows that sweep over page blocks together, prefill
chunks one (row, query block) at a time; each gathers its pages once per block and keeps a running
softmax (arXiv 2205.14135, algorithm 1), so that memory does not grow with the context and the trip
count is bounded by the longest row of the tile, without a recompilation. The scheduler lists decode
rows by length, so that rows of a tile are of like length.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxkv.axes import MeshAxes
from jaxkv.kv.codecs import Codec
from jaxkv.kv.layout import HeadMajorLayout, LaneRowsLayout
from jaxkv.kv.state import (
    PageTables,
    Statistics,
    Store,
    destinations,
    write,
    write_entries,
)
from jaxkv.ops.attention import expanded, native
from jaxkv.ops.attention.absorbed import Absorbed
from jaxkv.ops.attention.base import Attended, Batch, Heads, LatentMaps, Needs, Place, Terms
from jaxkv.ops.attention.distances import Distances
from jaxkv.ops.attention.divided import of_all_heads, own_destinations, own_store, token_axes
from jaxkv.ops.attention.expanded import LEAST_QUERIES, attend_expanded
from jaxkv.ops.attention.index import Choice, Entries, EntryShape
from jaxkv.ops.attention.select import select_pages
from jaxkv.ops.attention.sweep import BLOCK, Blocking, Scores, Window, attend, rows_of
from jaxkv.ops.native import is_wide
from kernels_pallas.tpu.layout import LANES

CPU_TILE_ROWS = 8
"""Decode rows that sweep together on a CPU: with BLOCK keys of each, what is gathered stays in the
cache.
"""

CPU_MIN_QUERIES = 2
"""Per KV head: XLA:CPU adds up the product of a vector and a matrix in another order than that of
two matrices.
"""

QUERY_BLOCK = 64
"""Queries of one prefill work item on a CPU: a chunk of fewer costs as much. With 128, 32 rows of
16 tokens took 1.8 times as long, long prompts as long as with 64 (docs/benchmarks/cpu_choices.md).
"""

LARGE_QUERIES, LARGE_KEYS = 256, 1024
"""Queries of one prefill work item elsewhere, and the keys that meet them at once: there each
iteration costs some 30 us whatever it computes (docs/benchmarks/gpu_kernels.md).
"""

LARGE_ROWS = 1 << 14
"""Queries of all heads together meet those keys, at most: their scores take 64 MiB."""

LARGE_SLOTS = 1 << 14
"""Slots that all decode rows together gather at once elsewhere: 64 MiB of 8 KV heads of 128, read
twice and written once, for which the bandwidth of an H200 takes some 60 us.
"""


def prefill_queries(num_heads: int) -> int:
    """Returns the queries of one prefill work item where that is not a CPU."""
    return max(QUERY_BLOCK, min(LARGE_QUERIES, LARGE_ROWS // num_heads))


def decode_keys(num_rows: int) -> int:
    """Returns how many keys of each decode row are gathered at once where that is not a CPU: a
    power of two.
    """
    most = min(4 * LARGE_KEYS, max(BLOCK, LARGE_SLOTS // num_rows))
    return 1 << most.bit_length() - 1


@dataclass(frozen=True, slots=True)
class Xla:
    """See `base.Backend`. `deterministic`: as in `read`. `on_lanes`: pages are rows of whole
    registers, as a TPU's memory has them.
    """

    # Blocks of keys must not begin elsewhere, or a query would add up in another order.
    aligned_len: ClassVar[int] = BLOCK
    deterministic: bool = False
    on_lanes: bool = False
    tokens_over: MeshAxes | None = None

    def refuses(self, heads: Heads, needs: Needs) -> str | None:
        return None

    def page_layout(self, heads: Heads, page_size: int, codec: Codec) -> HeadMajorLayout:
        # Entries are parts of a row: with rows of lanes those are rows of their own.
        pads = self.on_lanes and (codec.width(heads.head_dim) % LANES or heads.has_entries)
        kind = LaneRowsLayout if pads else HeadMajorLayout
        return kind(
            num_kv_heads=heads.num_kv_heads,
            head_dim=heads.head_dim,
            page_size=page_size,
            codec=codec,
            latent_dim=heads.latent_dim,
            has_index_key=heads.has_index_key,
        )

    def prepare(
        self, store: Store, tables: PageTables, batch: Batch, heads: Heads
    ) -> tuple[jax.Array, Window, Window]:
        start_T = batch.start_B.at[batch.row_T].get(mode="fill", fill_value=0)
        offset_T = jnp.arange(batch.token_T.shape[0], dtype=jnp.int32) - start_T
        dest_T = destinations(store, tables, row_T=batch.row_T, offset_T=offset_T)
        if (axis := token_axes(store, self.tokens_over)) is not None:
            dest_T = own_destinations(dest_T, own_store(store), axis)
        return dest_T, heads.window, heads.chunk

    def attend(
        self,
        q_TNH: jax.Array,
        k_TKH: jax.Array | None,
        v_TKH: jax.Array | None,
        at: Place,
        batch: Batch,
        prepared: tuple[jax.Array, Window, Window],
        terms: Terms,
    ) -> Attended:
        dest_T, window, chunk = prepared
        store, index, tokens_over = at.store, terms.index, token_axes(at.store, self.tokens_over)
        if tokens_over is not None:
            store = own_store(store)
        if k_TKH is not None:
            store = write(store, k_TKH, v_TKH, dest_T=dest_T, layer=at.layer)
        entry: EntryShape | None = None
        if isinstance(index, Entries):
            store = _with_entries(store, index, dest_T, at.layer)
            window, entry, index = index.window, index.shape, index.index
        out_TNH, statistics = read(
            q_TNH,
            at._replace(store=store),
            batch,
            scale=terms.scale,
            window=window,
            chunk=chunk,
            cap=terms.cap,
            sinks_N=terms.sinks_N,
            maps=terms.maps,
            index=index,
            distances=terms.distances,
            entry=entry,
            tokens_over=tokens_over,
            deterministic=self.deterministic,
        )
        return Attended(out_TNH, replace(store, layout=at.store.layout), statistics)


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
    maps: LatentMaps | None = None,
    index: Choice | None = None,
    distances: Distances | None = None,
    entry: EntryShape | None = None,
    tokens_over: MeshAxes | None = None,
    decoded: jax.Array | None = None,
    deterministic: bool = False,
) -> tuple[jax.Array, Statistics | None]:
    """Attends over pages that have the step's keys and values, `at.tables.len_B` its tokens, and
    over those of `at.store.low`. Returns [T, N, H] float32, as wide as values are, and
    `at.statistics` with this layer's added.

    maps, index, distances: as in `base.Terms`; without maps latent queries and outputs are absorbed
    ones. entry: of entries, that `index` chooses among then. tokens_over: as in `Scores`; decoded:
    what its decode rows come to, where that is known, [B, N, V].
    `deterministic`: on a CPU, a query gets the same bits in a decode row as in a prefill chunk.
    """
    codec, q_TNH = at.store.codec, q_TNH.astype(jnp.float32)
    if sinks_N is not None:
        sinks_N = of_all_heads(sinks_N, tokens_over, along=0)
    sinks_KG = None if sinks_N is None else sinks_N.reshape(at.store.num_kv_heads, -1)
    asked = Scores(window, chunk, cap, sinks_KG, entry, index, distances, tokens_over)
    of_rows = partial(_read_rows, at=at, batch=batch, asked=asked, deterministic=deterministic)

    if maps is None and tokens_over is None and decoded is None:
        # Once for all: what a rotation rounds to may depend on how many are rotated.
        out_TNH, statistics = of_rows(codec.rotate(q_TNH * scale), batch.count_B)
        return codec.restore(out_TNH)[..., : at.store.layout.latent_dim], statistics
    form = Absorbed(maps, at.store.layout, scale, tokens_over)
    absorbed = partial(of_rows, enter=form.enter, leave=form.leave, decoded=decoded)
    # The expanded form knows one softmax over plain pages, and gives other bits than decode rows.
    has_more = at.statistics is not None or at.store.low is not None or sinks_N is not None
    has_more = has_more or index is not None
    is_short = batch.decode_only or (batch.chunk_len or q_TNH.shape[0]) < LEAST_QUERIES
    if maps is None or is_short or has_more or deterministic:
        return absorbed(q_TNH, batch.count_B)
    is_long_B = batch.count_B >= LEAST_QUERIES
    out_TNH, _ = absorbed(q_TNH, jnp.where(is_long_B, 0, batch.count_B))
    long = partial(attend_expanded, maps=maps, asked=asked)
    queries = prefill_queries(q_TNH.shape[1])
    long_TNH = jax.lax.platform_dependent(
        *(q_TNH * scale, at, batch, is_long_B),
        cpu=partial(long, num_queries=expanded.QUERIES, num_keys=expanded.ROWS),
        default=partial(long, num_queries=queries, num_keys=LARGE_KEYS),
    )
    is_long_T = is_long_B.at[batch.row_T].get(mode="fill", fill_value=False)
    return jnp.where(is_long_T[:, None, None], long_TNH, out_TNH), None


def _with_entries(store: Store, asked: Entries, dest_T: jax.Array, layer: int | jax.Array) -> Store:
    """Stores the entries that a step completes."""
    if asked.shape is None or asked.entry_EX is None or asked.last_E is None:
        return store
    nowhere = store.num_pages * store.page_size
    dest_E = dest_T.at[asked.last_E].get(mode="fill", fill_value=nowhere)
    return write_entries(store, asked.entry_EX, dest_E=dest_E, rate=asked.shape.rate, layer=layer)


def _unchanged(x: jax.Array) -> jax.Array:
    return x


def _read_rows(
    q_TNH: jax.Array,
    count_B: jax.Array,
    *,
    at: Place,
    batch: Batch,
    asked: Scores,
    deterministic: bool,
    enter: Callable[[jax.Array], jax.Array] = _unchanged,
    leave: Callable[[jax.Array], jax.Array] = _unchanged,
    decoded: jax.Array | None = None,
) -> tuple[jax.Array, Statistics | None]:
    """Attends decode rows, and the first `count` tokens of each prefill row. `enter` makes of
    queries what meets the pages, and `leave` of what they have found there what comes out. decoded:
    as in `read`.
    """
    # `deterministic` wants one code for pages of any kind and size.
    has_more = asked.choice is not None or asked.distances is not None
    has_more = has_more or asked.tokens_over is not None
    handler = None if has_more or deterministic else native.handler_for(at)
    is_all = handler is not None and is_wide()
    by_xla = partial(
        attend_rows,
        asked=asked,
        deterministic=deterministic,
        enter=enter,
        leave=leave,
        decoded=decoded,
        handler=None if is_all else handler,  # without AVX-512 chunks are faster by XLA
    )
    if handler is None or not is_all:
        return by_xla(q_TNH, at, batch, count_B)
    by_machine_code = partial(native.attend, handler=handler, asked=asked)
    return jax.lax.platform_dependent(
        *(q_TNH, at, batch), cpu=by_machine_code, default=partial(by_xla, count_B=count_B)
    )


def attend_rows(
    q_TNH: jax.Array,
    at: Place,
    batch: Batch,
    count_B: jax.Array | None = None,
    *,
    asked: Scores,
    deterministic: bool = False,
    enter: Callable[[jax.Array], jax.Array] = _unchanged,
    leave: Callable[[jax.Array], jax.Array] = _unchanged,
    decoded: jax.Array | None = None,
    handler: str | None = None,
) -> tuple[jax.Array, Statistics | None]:
    """Attends as `_read_rows` does, by XLA, but for decode rows where there is a handler for a CPU.
    count_B: None for all tokens of the step.
    """
    count_B = batch.count_B if count_B is None else count_B
    num_rows = at.tables.table_BW.shape[0]
    if decoded is None:
        is_decode_B = (jnp.arange(num_rows) < batch.num_decode) & (batch.count_B > 0)
        decode = partial(_decode, asked=asked)
        # XLA:CPU is faster at these tiny matmuls in float32, whatever the pages hold.
        on_cpu: Callable[..., tuple[jax.Array, Statistics | None]] = partial(
            decode,
            tile_rows=CPU_TILE_ROWS,
            min_queries=CPU_MIN_QUERIES,
            blocking=Blocking(in_float32=not deterministic),
        )
        if handler is not None:
            on_cpu = partial(native.decode, handler=handler, asked=asked)
        found, statistics = jax.lax.platform_dependent(
            enter(q_TNH[:num_rows]),
            at,
            batch.position_T[:num_rows],
            is_decode_B,
            cpu=on_cpu,
            default=partial(
                decode, tile_rows=num_rows, min_queries=1, blocking=Blocking(decode_keys(num_rows))
            ),
        )
        at, decoded = at._replace(statistics=statistics), leave(found)
    if batch.decode_only:
        return decoded, at.statistics
    fill = partial(_prefill, enter=enter, leave=leave, asked=asked)
    in_float32 = batch.chunk_len is not None and not deterministic
    num_devices = 1 if asked.tokens_over is None else jax.lax.axis_size(asked.tokens_over)
    num_heads = q_TNH.shape[1] * num_devices  # that meet a page here
    return jax.lax.platform_dependent(
        *(q_TNH, decoded, count_B, at, batch),
        cpu=partial(fill, num_queries=QUERY_BLOCK, blocking=Blocking(in_float32=in_float32)),
        default=partial(
            fill, num_queries=prefill_queries(num_heads), blocking=Blocking(LARGE_KEYS)
        ),
    )


def _decode(
    q_BNH: jax.Array,
    at: Place,
    position_B: jax.Array,
    live_B: jax.Array,
    *,
    tile_rows: int,
    min_queries: int,
    blocking: Blocking,
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
        out, found = attend(
            take(q_BKGH),
            at,
            rows,
            position_R[:, None],
            bounds,
            blocking=blocking,
            asked=asked.with_tokens(take),
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
    held = replace(tables, len_B=len_B)
    every_row = rows_of(at.store, held, asked.window, asked.tokens_over)
    return jax.lax.fori_loop(0, -(-num_rows // size), tile, (jnp.zeros_like(q_BNH), before))


def _prefill(
    q_TNH: jax.Array,
    out_TNH: jax.Array,
    count_B: jax.Array,
    at: Place,
    batch: Batch,
    *,
    enter: Callable[[jax.Array], jax.Array],
    leave: Callable[[jax.Array], jax.Array],
    asked: Scores,
    num_queries: int,
    blocking: Blocking,
) -> tuple[jax.Array, Statistics | None]:
    """Attends the first `count` tokens of every prefill row's chunk, all or none, `num_queries` at
    a time, written over `out` (which holds the decode rows).
    """
    num_tokens, heads = q_TNH.shape[0], at.store.num_kv_heads
    size = min(num_queries, batch.chunk_len or num_tokens)
    # Blocks may run past their row's end: there are zeros, which the next row overwrites, or which
    # padding keeps, as matmuls on a CPU leave out rows of zeros; or they lie in this extra block.
    q_TNH = jnp.pad(q_TNH, ((0, size), (0, 0), (0, 0)))
    position_T = jnp.pad(batch.position_T, (0, size))
    asked = asked.with_tokens(lambda x: jnp.pad(x, ((0, size), *((0, 0),) * (x.ndim - 1))))
    out_TNH = jnp.pad(out_TNH, ((0, num_tokens + size - out_TNH.shape[0]), (0, 0), (0, 0)))
    rows, tables = rows_of(at.store, at.tables, asked.window, asked.tokens_over), at.tables

    def block(
        row: jax.Array, done: jax.Array, carry: tuple[jax.Array, Statistics | None]
    ) -> tuple[Any, Any]:
        out_TNH, statistics = carry
        start, is_row_T = batch.start_B[row] + done, done + jnp.arange(size) < count_B[row]
        take_tokens = partial(jax.lax.dynamic_slice_in_dim, start_index=start, slice_size=size)
        q, position = enter(take_tokens(q_TNH)), take_tokens(position_T)
        per_head = q.shape[1] // heads
        # [T, K, G, H] -> [1, K, T*G, H]: all queries that share a KV head meet its keys in one
        # matmul.
        q = (
            q.reshape(size, heads, per_head, -1)
            .transpose(1, 0, 2, 3)
            .reshape(1, heads, size * per_head, -1)
        )
        length = tables.len_B[row]
        place = length - batch.count_B[row] + done
        reach = asked.reach(position[0])
        low = jnp.int32(0) if reach is None else jnp.maximum(place + 1 - reach, 0)
        take_row = partial(jax.lax.dynamic_slice_in_dim, start_index=row, slice_size=1)
        out, found = attend(
            q,
            at,
            jax.tree.map(take_row, rows),
            jnp.repeat(position, per_head)[None, :],
            (low, jnp.minimum(place + size, length)),
            blocking=blocking,
            asked=asked.with_tokens(take_tokens),
        )
        if statistics is not None and found is not None and tables.since_B is not None:
            counts_T = is_row_T & (position >= tables.since_B[row])
            new = found.counted(jnp.repeat(counts_T, per_head)[None], statistics)
            statistics = jax.tree.map(
                lambda all_B, new_1: all_B.at[row].add(new_1[0]), statistics, new
            )
        out = (
            out.reshape(heads, size, per_head, -1)
            .transpose(1, 0, 2, 3)
            .reshape(size, heads * per_head, -1)
        )
        out = jnp.where(is_row_T[:, None, None], leave(out), 0)
        return jax.lax.dynamic_update_slice_in_dim(out_TNH, out, start, 0), statistics

    def row_step(row: jax.Array, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        num_blocks = (count_B[row] + size - 1) // size
        return jax.lax.fori_loop(0, num_blocks, lambda i, carry: block(row, i * size, carry), carry)

    carry = (out_TNH, at.statistics)
    out_TNH, statistics = jax.lax.fori_loop(batch.num_decode, batch.num_rows, row_step, carry)
    return out_TNH[:num_tokens], statistics
