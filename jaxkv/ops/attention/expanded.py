"""Attends long chunks of latent attention expanded: what a page holds of a token is made into a key
and a value of each head, once per chunk, a block of tokens at a time.

For a query, a row and a head that is (C + P + V) x 2 operations instead of the (2 R + P) x 2 of the
absorbed form, and making them R x (C + V) x 2 for a row and a head: with DeepSeek's sizes less from
171 queries on (docs/benchmarks/latent.md).
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from jaxkv.kv.codecs import Elements, decode_elements
from jaxkv.kv.layout import once
from jaxkv.ops.attention.base import Batch, LatentMaps, Place
from jaxkv.ops.attention.divided import share_of
from jaxkv.ops.attention.softmax import Softmax
from jaxkv.ops.attention.sweep import Blocks, Scores, accumulate, rows_of

LEAST_QUERIES = 256
"""Chunks of fewer are attended absorbed."""

QUERIES, ROWS = 128, 256
"""Queries that meet a block of so many rows at once, on a CPU."""


def attend_expanded(
    q_TNH: jax.Array,
    at: Place,
    batch: Batch,
    is_long_B: jax.Array,
    *,
    maps: LatentMaps,
    asked: Scores,
    num_queries: int,
    num_keys: int,
) -> jax.Array:
    """Attends the chunks of rows that are long, `num_queries` and `num_keys` at a time; scaled
    queries [T, N, C + P]. Returns [T, N, V] float32, zeros for all other tokens.

    All of a row's queries meet a block of keys before the next one is made. A chunk's own rows are
    read from their pages too: what a query meets does not depend on how a prompt was cut.
    """
    num_tokens, num_heads, _ = q_TNH.shape
    codec, size = at.store.codec, min(num_queries, num_tokens)
    dtype = jnp.dtype(codec.dtype)
    # Blocks may run past their row's end: what is there sees nothing of this row.
    padding = ((0, size), (0, 0), (0, 0))
    q_1NTH = jnp.pad(q_TNH.astype(dtype), padding).transpose(1, 0, 2)[None]
    position_T = jnp.pad(batch.position_T, (0, size))
    rows = rows_of(at.store, at.tables, asked.window, asked.tokens_over)
    share = share_of(at.store, asked.tokens_over)
    num_devices = share.page_size // at.store.page_size

    def attend_row(row: jax.Array, state: Softmax) -> Softmax:
        own = jax.tree.map(
            partial(jax.lax.dynamic_slice_in_dim, start_index=row, slice_size=1), rows
        )
        blocks = Blocks.of(at.store, own, at.layer, size=num_keys // num_devices, in_float32=False)
        start, count = batch.start_B[row], batch.count_B[row]
        before = at.tables.len_B[row] - count
        reach = asked.reach(position_T[start])
        low = jnp.int32(0) if reach is None else jnp.maximum(before + 1 - reach, 0)
        first, end = blocks.covering(*share.covering(low, at.tables.len_B[row], at.store))

        def meet_block(i: jax.Array, state: Softmax) -> Softmax:
            found = blocks.read(i)
            row_JH = decode_elements(codec, found.values)[0, 0]
            seen_by = found.position_RKJ, found.held_RKJ
            if asked.tokens_over is not None:  # heads meet the rows of all devices
                row_JH = jax.lax.all_gather(row_JH, asked.tokens_over, tiled=True)
                gather = partial(
                    jax.lax.all_gather, axis_name=asked.tokens_over, axis=2, tiled=True
                )
                seen_by = jax.tree.map(gather, seen_by)
            made = (once(x.astype(dtype))[None] for x in maps.expand(row_JH))
            keys, values = map(Elements, made)

            def meet_queries(j: jax.Array, state: Softmax) -> Softmax:
                take = partial(
                    jax.lax.dynamic_slice_in_dim, start_index=start + j * size, slice_size=size
                )
                is_own = j * size + jnp.arange(size) < count
                position_1M = jnp.where(is_own, take(position_T), -1)[None]
                seen = once(asked.seen(position_1M, *seen_by))
                old = jax.tree.map(partial(take, axis=2), state)
                new, _ = accumulate(old, take(q_1NTH, axis=2), keys, values, seen, asked.cap)
                put = partial(
                    jax.lax.dynamic_update_slice_in_dim, start_index=start + j * size, axis=2
                )
                return jax.tree.map(put, state, new)

            # Queries before the block's first slot do not see it.
            earliest = jnp.maximum(i * blocks.size * num_devices - before, 0) // size
            return jax.lax.fori_loop(earliest, (count + size - 1) // size, meet_queries, state)

        return jax.lax.fori_loop(first, jnp.where(is_long_B[row], end, first), meet_block, state)

    empty = Softmax.empty(1, num_heads, num_tokens + size, maps.v_up.num_rows)
    state = jax.lax.fori_loop(batch.num_decode, batch.num_rows, attend_row, empty)
    return state.result()[0, :, :num_tokens].transpose(1, 0, 2)
