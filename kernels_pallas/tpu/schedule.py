"""Makes the lists of work of a step, which are equal for all layers of a KV group: once per step.

Positions become ranges of slots here: rows list their slots by rising position, so what a query
sees of its row (causal, window, dropped pages) is one range of slots, and the decode kernel needs
no position at all.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp

from kernels_pallas.rows import Rows, cdiv, expand
from kernels_pallas.tpu.layout import LANES
from kernels_pallas.tpu.tiles import TILE, Tiles

Ints = jax.Array  # int32, one entry per item unless said otherwise

SMEM_BYTES = 768 << 10
"""Tables and lists of work may take so much of a core's 1 MiB of scalar memory; above it they stay
in HBM.
"""

RECORD_FIELDS = ("row", "low", "high", "new", "first")
"""A decode item's record begins with these, and has its page ids from column RECORD_IDS on."""

RECORD_IDS = 8


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["num", "row", "start", "low", "high", "new", "first"],
    meta_fields=[],
)
@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeItems:
    """Lists blocks of `Tiles.decode_pages` pages of decode rows, a row's in order, rows one after
    the other.

    num [1] items. row; start: index of the first page in the flat table; low, high: slots of the
    block that the row's query sees are low <= slot < high; new: slot of the block where the step's
    token goes, -1 if it is in another block;
    first: 1 for a row's first block. Entries past `num` see nothing, write nothing and belong to
    the last row.
    """

    num: Ints
    row: Ints
    start: Ints
    low: Ints
    high: Ints
    new: Ints
    first: Ints


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["num", "page", "offset", "low", "high", "token"],
    meta_fields=[],
)
@dataclass(frozen=True, kw_only=True, slots=True)
class WriteItems:
    """Lists tiles of TILE slots, or packed pages, that chunks write: slots low <= slot < high of
    the tile at `offset` in page `page`.

    num [1] items; token [items, tile]: the packed token of each slot, any where none is written.
    """

    num: Ints
    page: Ints
    offset: Ints
    low: Ints
    high: Ints
    token: Ints


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["num", "table", "query", "slot", "low", "high", "lowest", "token", "where"],
    meta_fields=[],
)
@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillItems:
    """Lists blocks of `Tiles.prefill_queries` queries of chunks, repacked so that each chunk begins
    at a multiple of TILE.

    num [1] items; table: index of the row's first page in the flat table, or the row where tables
    stay in HBM; query: repacked index of the first query; slot: that of the first query;
    low, high: slots that some query of the block sees, low a page's first;
    lowest: the lowest position that the first query sees, None without a window.
    token [repacked]: the packed token of each repacked one; where [T]: the inverse, and the first
    past the chunks' end for a token that is in none.
    """

    num: Ints
    table: Ints
    query: Ints
    slot: Ints
    low: Ints
    high: Ints
    lowest: Ints | None
    token: Ints
    where: Ints


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["table", "first", "records", "num_decode", "decode", "write", "prefill"],
    meta_fields=["batch", "width", "page_size", "tiles", "windowed"],
)
@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """Holds a step's work. table, first: [B * W + a block] flat; first: [1] without a window.

    Tables too large for scalar memory stay in HBM: table, first [B, 1, W + a block, rounded up]
    and, with page ids and all, the decode items' `records` [items, 1, RECORD_IDS + a block, rounded
    up]; None where they are not too large.
    write, prefill: None where every row is a decode row.
    """

    table: Ints
    first: Ints
    records: Ints | None
    num_decode: jax.Array
    decode: DecodeItems
    write: WriteItems | None
    prefill: PrefillItems | None
    batch: int
    width: int
    page_size: int
    tiles: Tiles
    windowed: bool


def make_schedule(
    table_BW: jax.Array,
    first_BW: jax.Array,
    len_B: jax.Array,
    start_B: jax.Array,
    count_B: jax.Array,
    num_decode: jax.Array,
    num_rows: jax.Array,
    *,
    num_tokens: int,
    page_size: int,
    window: int | jax.Array | None,
    tiles: Tiles,
    packed: bool = False,
    decode_only: bool = False,
    writes_B: jax.Array | None = None,
    smem_bytes: int = SMEM_BYTES,
) -> Schedule:
    """Makes the work of a step of `num_tokens` packed tokens T, whose rows hold `len_B` tokens with
    the step's own included.

    Rows 0..num_decode-1 have one token each (or none: count 0) at packed offset = row, rows
    num_decode..num_rows-1 are chunks. first_BW rises by a page or more from one held page to the
    next; positions of a chunk are consecutive. writes_B: the decode rows whose own token these
    pages take, as the last of `len_B`; None: of all.
    """
    table_BW, first_BW, len_B, start_B, count_B = (
        jnp.asarray(x, jnp.int32) for x in (table_BW, first_BW, len_B, start_B, count_B)
    )
    num_batch = table_BW.shape[0]
    row_B = jnp.arange(num_batch, dtype=jnp.int32)
    live_B = (count_B > 0) & (row_B < num_rows)
    rows = Rows(table_BW, first_BW, len_B, start_B, count_B, page_size, window)
    decode = _decode_items(
        rows, live_B & (row_B < num_decode), writes_B, min(num_batch, num_tokens), tiles
    )
    write = prefill = None
    if not decode_only:
        chunk_B = live_B & (row_B >= num_decode)
        write = _write_items(rows, chunk_B, num_tokens, page_size if packed else TILE)
        prefill = _prefill_items(rows, chunk_B, num_tokens, tiles)
    # A block may end past its row's pages: ids are read before it is known whether the page is
    # fetched.
    padding = max(tiles.decode_pages, tiles.prefill_block)
    table = jnp.pad(table_BW.reshape(-1), (0, padding))
    first = (
        jnp.zeros(1, jnp.int32) if window is None else jnp.pad(first_BW.reshape(-1), (0, padding))
    )
    records = None
    if 4 * sum(x.size for x in jax.tree.leaves((table, first, decode))) > smem_bytes:
        records = _records(decode, table, tiles)
        table, first = (
            _by_row(x_BW, padding)
            for x_BW in (table_BW, first_BW[:, :0] if window is None else first_BW)
        )
        if prefill is not None:
            prefill = replace(prefill, table=prefill.table // rows.width)
    return Schedule(
        table=table,
        first=first,
        records=records,
        num_decode=jnp.asarray(num_decode, jnp.int32),
        decode=decode,
        write=write,
        prefill=prefill,
        batch=num_batch,
        width=table_BW.shape[1],
        page_size=page_size,
        tiles=tiles,
        windowed=window is not None,
    )


def _decode_items(
    rows: Rows, live_B: jax.Array, writes_B: jax.Array | None, num_decode: int, tiles: Tiles
) -> DecodeItems:
    size, block = rows.page_size, tiles.decode_pages
    len_D = jnp.minimum(rows.len_B, rows.width * size)[:num_decode]
    low_D = rows.low_slot(jnp.arange(num_decode, dtype=jnp.int32), len_D - 1)
    page_D = low_D // size
    blocks_D = jnp.where(live_B[:num_decode], cdiv(cdiv(len_D, size) - page_D, block), 0)
    num, row, index = expand(blocks_D, num_decode * -(-rows.width // block) + tiles.decode_spare)
    real = jnp.arange(row.shape[0], dtype=jnp.int32) < num
    page = page_D[row] + index * block
    high = jnp.clip(len_D[row] - page * size, 0, block * size)
    is_new = real & (index == blocks_D[row] - 1) & (rows.len_B[row] <= rows.width * size)
    is_new = is_new if writes_B is None else is_new & writes_B[row]
    return DecodeItems(
        num=num,
        row=row,
        start=row * rows.width + page,
        low=jnp.maximum(low_D[row] - page * size, 0),
        high=jnp.where(real, high, 0),
        new=jnp.where(is_new, high - 1, -1),
        first=(real & (index == 0)).astype(jnp.int32),
    )


def _records(items: DecodeItems, table: jax.Array, tiles: Tiles) -> jax.Array:
    fields = jnp.stack([getattr(items, name) for name in RECORD_FIELDS], axis=1)
    index = items.start[:, None] + jnp.arange(tiles.decode_pages, dtype=jnp.int32)[None, :]
    ids = table.at[index].get(mode="clip")
    fields = jnp.pad(fields, ((0, 0), (0, RECORD_IDS - fields.shape[1])))
    return _by_row(jnp.concatenate([fields, ids], axis=1), 0)


def _by_row(x_BW: jax.Array, padding: int) -> jax.Array:
    """Pads to [B, 1, W + padding, rounded up]: what one DMA takes is whole registers."""
    width = -(-(x_BW.shape[1] + padding) // LANES) * LANES
    return jnp.pad(x_BW, ((0, 0), (0, width - x_BW.shape[1])))[:, None]


def _write_items(rows: Rows, chunk_B: jax.Array, num_tokens: int, tile: int) -> WriteItems:
    begin_B = rows.len_B - rows.count_B
    end_B = jnp.minimum(rows.len_B, rows.width * rows.page_size)
    tiles_B = jnp.where(chunk_B, jnp.maximum(cdiv(end_B, tile) - begin_B // tile, 0), 0)
    # A chunk of n tokens touches at most n / tile + 2 tiles, rounded down.
    size = num_tokens // tile + 2 * min(rows.len_B.shape[0], num_tokens)
    num, row, index = expand(tiles_B, size)
    slot = (begin_B[row] // tile + index) * tile
    page = rows.table_BW[row, jnp.minimum(slot // rows.page_size, rows.width - 1)]
    source = (rows.start_B[row] + slot - begin_B[row])[:, None] + jnp.arange(tile, dtype=jnp.int32)[
        None, :
    ]
    return WriteItems(
        num=num,
        page=page,
        offset=slot % rows.page_size,
        low=jnp.maximum(begin_B[row] - slot, 0),
        high=jnp.clip(end_B[row] - slot, 0, tile),
        token=jnp.clip(source, 0, num_tokens - 1),
    )


def _prefill_items(rows: Rows, chunk_B: jax.Array, num_tokens: int, tiles: Tiles) -> PrefillItems:
    block, max_rows = tiles.prefill_queries, min(rows.len_B.shape[0], num_tokens)
    count_B = jnp.where(chunk_B, rows.count_B, 0)
    num, row, index = expand(cdiv(count_B, block), num_tokens // block + max_rows + 1)
    rounded_B = cdiv(count_B, TILE) * TILE
    aligned_B = jnp.cumsum(rounded_B, dtype=jnp.int32) - rounded_B
    slot = rows.len_B[row] - count_B[row] + index * block
    queries = jnp.minimum(count_B[row] - index * block, block)
    low = rows.low_slot(row, slot) // rows.page_size * rows.page_size

    # The last block may run past its chunk, so a block of anything follows the last chunk.
    size = -(-(num_tokens + (TILE - 1) * max_rows) // TILE) * TILE + block
    _, token_row, offset = expand(rounded_B, size)
    token = jnp.clip(rows.start_B[token_row] + offset, 0, num_tokens - 1)
    spread = jnp.where(offset < count_B[token_row], token, num_tokens)
    spread = jnp.where(jnp.arange(size) < rounded_B.sum(), spread, num_tokens)
    where = (
        jnp.full(num_tokens, size - 1, jnp.int32)
        .at[spread]
        .set(jnp.arange(size, dtype=jnp.int32), mode="drop")
    )
    return PrefillItems(
        num=num,
        table=row * rows.width,
        query=aligned_B[row] + index * block,
        slot=slot,
        low=low,
        high=jnp.minimum(slot + queries, rows.width * rows.page_size),
        lowest=rows.lowest(row, slot),
        token=token,
        where=where,
    )
