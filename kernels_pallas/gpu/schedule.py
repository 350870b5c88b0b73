"""Makes the lists of work of a step, equal for all layers of a KV group: once per step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from kernels_pallas.rows import Rows, cdiv, expand

TILE = 64
"""Keys that one matmul instruction (wgmma) takes: what is fetched, and attended, at once."""

ITEM_TILES = 4
"""Tiles of an item, at least: less is not worth the query's fetch and a partial result."""


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["num", "row", "begin", "tiles", "low", "high", "first", "parts", "table"],
    meta_fields=["num_rows", "width"],
)
@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeItems:
    """Lists parts of decode rows, each of some tiles of a row, in order; rows one after the other.

    int32, [items] each unless said otherwise. num [1] items; row; begin: slot where the first tile
    begins, a multiple of TILE; tiles; low, high: slots of the row that the query sees are low <=
    slot < high, high at most the part's end. Entries past `num` have no tiles. first, parts [rows]:
    of each row the number of its first item, and how many it has. table [B * width] flat.
    """

    num: jax.Array
    row: jax.Array
    begin: jax.Array
    tiles: jax.Array
    low: jax.Array
    high: jax.Array
    first: jax.Array
    parts: jax.Array
    table: jax.Array
    num_rows: int
    width: int


@partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "num",
        "row",
        "token",
        "slot",
        "begin",
        "tiles",
        "high",
        "lowest",
        "where",
        "table",
        "first",
    ],
    meta_fields=["size", "width"],
)
@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillItems:
    """Lists blocks of `size` queries of chunks; the last one of a chunk has others behind, whose
    results are of no use.

    int32, [items] each unless said otherwise. num [1] items; row; token: packed index of the first
    query; slot: where it is in its row; begin: slot where the first tile that any query sees
    begins; tiles; high: end of the slots that the queries see; lowest: the lowest position that the
    first query sees, None without a window. where [T]: item * size + index of each packed token, 0
    for one that is in no chunk. table, first [B * width] flat.
    """

    num: jax.Array
    row: jax.Array
    token: jax.Array
    slot: jax.Array
    begin: jax.Array
    tiles: jax.Array
    high: jax.Array
    lowest: jax.Array | None
    where: jax.Array
    table: jax.Array
    first: jax.Array
    size: int
    width: int


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["decode", "prefill", "num_decode"],
    meta_fields=["num_processors"],
)
@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """Holds a step's work. prefill: None where every row is a decode row. num_processors: of the
    GPU, for which it is cut.
    """

    decode: DecodeItems
    prefill: PrefillItems | None
    num_decode: jax.Array
    num_processors: int


def make_schedule(
    rows: Rows,
    num_decode: jax.Array,
    num_rows: jax.Array,
    *,
    num_tokens: int,
    num_heads: int,
    kv_heads: int,
    head_dim: int,
    num_processors: int,
    decode_only: bool = False,
) -> Schedule:
    """Makes the work of a step of `num_tokens` packed tokens T, whose rows hold `rows.len_B`
    tokens, the step's own included.

    Rows 0..num_decode-1 have one token each (or none: count 0) at packed offset = row, rows
    num_decode..num_rows-1 are chunks. first_BW rises by a page or more from one held page to the
    next; positions of a chunk are consecutive.
    """
    num_batch = rows.len_B.shape[0]
    row_B = jnp.arange(num_batch, dtype=jnp.int32)
    live_B = (rows.count_B > 0) & (row_B < num_rows)
    # A KV head of an item is a unit of work: six for each processor, of which two run at once.
    wanted = max(1, 6 * num_processors // kv_heads)
    decode = _decode_items(
        rows, live_B & (row_B < num_decode), num_rows=min(num_batch, num_tokens), wanted=wanted
    )
    prefill = None
    if not decode_only:
        size = prefill_rows(head_dim) // rows_per_query(num_heads // kv_heads)
        prefill = _prefill_items(
            rows, live_B & (row_B >= num_decode), num_tokens=num_tokens, size=size
        )
    return Schedule(
        decode=decode,
        prefill=prefill,
        num_decode=jnp.asarray(num_decode, jnp.int32),
        num_processors=num_processors,
    )


def prefill_rows(head_dim: int) -> int:
    """Counts the rows of a prefill block, TILE for each warpgroup: two leave too few registers for
    256 columns of results.
    """
    return 2 * TILE if head_dim <= 128 else TILE


def rows_per_query(per_head: int) -> int:
    """Rounds the query heads of a KV head up to a power of two, as a prefill block has them."""
    return 1 << (per_head - 1).bit_length()


def _decode_items(rows: Rows, live_B: jax.Array, *, num_rows: int, wanted: int) -> DecodeItems:
    """Makes the items of the first `num_rows` rows, those that are live: about `wanted` in all,
    those of a row of one length and none much longer than others, so that the processors that share
    them end together; more for more rows.
    """
    len_D = jnp.minimum(rows.len_B, rows.width * rows.page_size)[:num_rows]
    low_D = rows.low_slot(jnp.arange(num_rows, dtype=jnp.int32), len_D - 1)
    begin_D = low_D // TILE * TILE
    tiles_D = jnp.where(live_B[:num_rows], cdiv(len_D - begin_D, TILE), 0)
    most = jnp.maximum((tiles_D.sum(dtype=jnp.int32) + wanted - 1) // wanted, ITEM_TILES)
    parts_D = (tiles_D + most - 1) // most
    each_D = (tiles_D + parts_D - 1) // jnp.maximum(parts_D, 1)
    num, row, index = expand(parts_D, num_rows + wanted)
    real = jnp.arange(row.shape[0], dtype=jnp.int32) < num
    done = index * each_D[row]
    tiles = jnp.where(real, jnp.clip(tiles_D[row] - done, 0, each_D[row]), 0)
    begin = begin_D[row] + done * TILE
    return DecodeItems(
        num=num,
        row=row,
        begin=begin,
        tiles=tiles,
        low=low_D[row],
        high=jnp.minimum(len_D[row], begin + tiles * TILE),
        first=jnp.cumsum(parts_D, dtype=jnp.int32) - parts_D,
        parts=parts_D,
        table=rows.table_BW.reshape(-1),
        num_rows=num_rows,
        width=rows.width,
    )


def _prefill_items(rows: Rows, chunk_B: jax.Array, *, num_tokens: int, size: int) -> PrefillItems:
    """Makes the blocks of the rows that are chunks."""
    count_B = jnp.where(chunk_B, rows.count_B, 0)
    blocks_B = cdiv(count_B, size)
    max_rows = min(count_B.shape[0], num_tokens)
    num, row, index = expand(blocks_B, num_tokens // size + max_rows)
    real = jnp.arange(row.shape[0], dtype=jnp.int32) < num
    done = index * size
    slot = rows.len_B[row] - count_B[row] + done
    queries = jnp.minimum(count_B[row] - done, size)
    high = jnp.minimum(slot + queries, rows.width * rows.page_size)
    begin = rows.low_slot(row, slot) // TILE * TILE
    item_B = jnp.cumsum(blocks_B, dtype=jnp.int32) - blocks_B
    # The packed tokens of each item, scattered to their places; padding falls behind.
    within = jnp.arange(size, dtype=jnp.int32)
    token = rows.start_B[row] + done
    target = jnp.where(
        real[:, None] & (within[None] < queries[:, None]), token[:, None] + within[None], num_tokens
    )
    place = (item_B[row] + index)[:, None] * size + within[None]
    where = jnp.zeros(num_tokens, jnp.int32).at[target].set(place, mode="drop")
    return PrefillItems(
        num=num,
        row=row,
        token=token,
        slot=slot,
        begin=begin,
        tiles=jnp.where(real, cdiv(high - begin, TILE), 0),
        high=high,
        lowest=rows.lowest(row, slot),
        where=where,
        table=rows.table_BW.reshape(-1),
        first=rows.first_BW.reshape(-1),
        size=size,
        width=rows.width,
    )
