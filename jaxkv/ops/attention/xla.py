"""Paged attention in plain XLA: runs on every device, fast on a CPU.

Decode rows are attended in tiles of neighbouring rows that sweep over page blocks together, prefill chunks one (row,
query block) at a time; each gathers its pages once per block and keeps a running softmax (arXiv 2205.14135, algorithm
1), so that memory does not grow with the context and the trip count is bounded by the longest row of the tile, without
a recompilation. The scheduler lists decode rows by length, so that rows of a tile are of like length.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.kv.codecs import Codec, Elements
from jaxkv.kv.state import GroupKV, destinations, write
from jaxkv.ops.attention.base import Batch, Heads, Needs
from jaxkv.ops.layers import total

BLOCK = 128
"""Keys gathered per row and iteration, for decode rows and prefill chunks alike: both add up in the same order."""

CPU_TILE_ROWS = 8
"""Decode rows that sweep together on a CPU: with BLOCK keys of each, what is gathered stays in the cache."""

CPU_MIN_QUERIES = 2
"""Per KV head: XLA:CPU adds up the product of a vector and a matrix in another order than that of two matrices."""

FLOAT32_VALUES = 64
"""Float32 values are padded to a multiple: XLA:CPU adds up the product of a few queries and other widths in another
order than that of many."""

QUERY_BLOCK = 128
"""Queries of one prefill work item."""

MASKED = -1e30
"""Score of a key that is not seen: finite, so that a block without any seen key does not make NaN."""


class Softmax(NamedTuple):
    """Running softmax over key blocks: max and sum [R, K, M], accumulator [R, K, M, H], float32."""

    max: jax.Array
    sum: jax.Array
    acc: jax.Array

    @classmethod
    def empty(cls, *shape: int) -> Softmax:
        zeros = jnp.zeros(shape, jnp.float32)
        return cls(jnp.full(shape[:-1], MASKED, jnp.float32), zeros[..., 0], zeros)

    def result(self) -> jax.Array:
        # A row that saw nothing (padding) has sum 0: it gets zeros instead of NaN.
        return self.acc / jnp.where(self.sum > 0, self.sum, 1.0)[..., None]


@dataclass(frozen=True, slots=True)
class Xla:
    """See `base.Backend`. `deterministic`: as in `read`."""

    deterministic: bool = False

    def refuses(self, heads: Heads, needs: Needs) -> str | None:
        return None

    def page_arrays(self, heads: Heads, page_size: int, codec: Codec) -> tuple[jax.ShapeDtypeStruct, ...]:
        shape = (2 * heads.num_kv_heads, page_size, codec.width(heads.head_dim))
        return (jax.ShapeDtypeStruct(shape, codec.storage_dtype),)

    def prepare(self, group: GroupKV, batch: Batch, heads: Heads) -> tuple[jax.Array, int | None]:
        start_T = batch.start_B.at[batch.row_T].get(mode="fill", fill_value=0)
        offset_T = jnp.arange(batch.token_T.shape[0], dtype=jnp.int32) - start_T
        return destinations(group, row_T=batch.row_T, offset_T=offset_T), heads.window

    def attend(
        self,
        q_TNH: jax.Array,
        k_TKH: jax.Array,
        v_TKH: jax.Array,
        group: GroupKV,
        batch: Batch,
        prepared: tuple[jax.Array, int | None],
        *,
        layer: int | jax.Array,
        scale: float,
        out_dtype: np.dtype,
    ) -> tuple[jax.Array, GroupKV]:
        dest_T, window = prepared
        group = write(group, k_TKH, v_TKH, dest_T=dest_T, layer=layer)
        options: Any = {"layer": layer, "scale": scale, "window": window}
        return read(q_TNH, group, batch, deterministic=self.deterministic, **options), group


def read(
    q_TNH: jax.Array,
    group: GroupKV,
    batch: Batch,
    *,
    layer: int | jax.Array,
    scale: float,
    window: int | None,
    deterministic: bool = False,
) -> jax.Array:
    """Attention over pages that have the step's keys and values, `group.len_B` its tokens. Returns [T, N, H] float32.

    `deterministic`: on a CPU, a query gets the same bits in a decode row as in a prefill chunk.
    """
    num_rows = group.table_BW.shape[0]
    q_TNH = group.codec.rotate(q_TNH.astype(jnp.float32) * scale)
    is_decode_B = (jnp.arange(num_rows) < batch.num_decode) & (batch.count_B > 0)
    decode = partial(_decode, layer=layer, window=window)
    decoded = jax.lax.platform_dependent(
        q_TNH[:num_rows],
        group,
        batch.position_T[:num_rows],
        is_decode_B,
        # XLA:CPU is faster at these tiny matmuls in float32, whatever the pages hold.
        cpu=partial(decode, tile_rows=CPU_TILE_ROWS, min_queries=CPU_MIN_QUERIES, in_float32=not deterministic),
        default=partial(decode, tile_rows=num_rows, min_queries=1, in_float32=False),
    )
    out_TNH = decoded if batch.decode_only else _prefill(q_TNH, decoded, group, batch, layer=layer, window=window)
    return group.codec.restore(out_TNH)


def _decode(
    q_BNH: jax.Array,
    group: GroupKV,
    position_B: jax.Array,
    live_B: jax.Array,
    *,
    tile_rows: int,
    min_queries: int,
    in_float32: bool,
    layer: int | jax.Array,
    window: int | None,
) -> jax.Array:
    """One query per row, `tile_rows` rows side by side, with at least `min_queries` queries per KV head."""
    num_rows, num_heads, head_dim = q_BNH.shape
    heads, size = group.num_kv_heads, min(tile_rows, num_rows)
    per_head = num_heads // heads
    q_BKGH = q_BNH.reshape(num_rows, heads, per_head, head_dim)
    q_BKGH = jnp.pad(q_BKGH, ((0, 0), (0, 0), (0, max(0, min_queries - per_head)), (0, 0)))
    len_B = jnp.where(live_B, group.len_B, 0)
    first_B = jnp.zeros_like(len_B) if window is None else jnp.maximum(len_B - window, 0)
    first_B = jnp.where(live_B, first_B, jnp.iinfo(jnp.int32).max)

    def tile(i: jax.Array, out_BNH: jax.Array) -> jax.Array:
        # The last tile starts early rather than end late: rows computed twice come out the same.
        start = jnp.minimum(i * size, num_rows - size)
        take = partial(jax.lax.dynamic_slice_in_dim, start_index=start, slice_size=size)
        len_R = take(len_B)
        out = _sweep(
            take(q_BKGH),
            group,
            (take(group.table_BW), take(group.first_BW)),
            len_R,
            take(position_B)[:, None],
            (jnp.min(take(first_B)), jnp.max(len_R)),
            in_float32=in_float32,
            layer=layer,
            window=window,
        )
        out = out[:, :, :per_head].reshape(size, num_heads, head_dim)
        return jax.lax.dynamic_update_slice_in_dim(out_BNH, out, start, 0)

    return jax.lax.fori_loop(0, -(-num_rows // size), tile, jnp.zeros_like(q_BNH))


def _prefill(
    q_TNH: jax.Array, out_TNH: jax.Array, group: GroupKV, batch: Batch, *, layer: int | jax.Array, window: int | None
) -> jax.Array:
    """Every prefill row's chunk, QUERY_BLOCK queries at a time, written over `out` (which holds the decode rows)."""
    num_tokens, num_heads, head_dim = q_TNH.shape
    heads, size = group.num_kv_heads, min(QUERY_BLOCK, num_tokens)
    # Blocks may run past their row's end, and are then overwritten by the next row, or lie in this extra block.
    q_TNH = jnp.pad(q_TNH, ((0, size), (0, 0), (0, 0)))
    position_T = jnp.pad(batch.position_T, (0, size))
    out_TNH = jnp.pad(out_TNH, ((0, num_tokens + size - out_TNH.shape[0]), (0, 0), (0, 0)))

    def block(row: jax.Array, done: jax.Array, out_TNH: jax.Array) -> jax.Array:
        start = batch.start_B[row] + done
        q = jax.lax.dynamic_slice_in_dim(q_TNH, start, size)
        position = jax.lax.dynamic_slice_in_dim(position_T, start, size)
        # [T, K, G, H] -> [1, K, T*G, H]: all queries that share a KV head meet its keys in one matmul.
        q = q.reshape(size, heads, num_heads // heads, head_dim).transpose(1, 0, 2, 3).reshape(1, heads, -1, head_dim)
        length = group.len_B[row]
        index = length - batch.count_B[row] + done
        low = jnp.int32(0) if window is None else jnp.maximum(index + 1 - window, 0)
        take_row = partial(jax.lax.dynamic_slice_in_dim, start_index=row, slice_size=1)
        out = _sweep(
            q,
            group,
            (take_row(group.table_BW), take_row(group.first_BW)),
            length[None],
            jnp.repeat(position, num_heads // heads)[None, :],
            (low, jnp.minimum(index + size, length)),
            in_float32=False,
            layer=layer,
            window=window,
        )
        out = out.reshape(heads, size, num_heads // heads, head_dim).transpose(1, 0, 2, 3)
        return jax.lax.dynamic_update_slice_in_dim(out_TNH, out.reshape(size, num_heads, head_dim), start, 0)

    def row_step(row: jax.Array, out_TNH: jax.Array) -> jax.Array:
        num_blocks = (batch.count_B[row] + size - 1) // size
        return jax.lax.fori_loop(0, num_blocks, lambda i, out: block(row, i * size, out), out_TNH)

    return jax.lax.fori_loop(batch.num_decode, batch.num_rows, row_step, out_TNH)[:num_tokens]


def _sweep(
    q_RKMH: jax.Array,
    group: GroupKV,
    table: tuple[jax.Array, jax.Array],
    len_R: jax.Array,
    position_RM: jax.Array,
    bounds: tuple[jax.Array, jax.Array],
    *,
    in_float32: bool,
    layer: int | jax.Array,
    window: int | None,
) -> jax.Array:
    """Attention of M queries per KV head of R rows over slots bounds[0]..bounds[1]-1 of their tables, BLOCK of them
    (or one page) at a time. -> [R, K, M, H].

    Both matmuls take their inputs in the dtype that the pages decode to, or float32, and add up in float32.
    Blocks begin at multiples of their size, and one without a seen key changes no bit: what a query gets does not
    depend on the bounds.

    position_RM has the position of each query, or [R, 1] where all queries of a row share it.
    """
    num_rows, heads, _, head_dim = q_RKMH.shape
    size = group.page_size
    per_block = max(1, BLOCK // size)
    width = table[0].shape[1]
    table_RW, first_RW = (jnp.pad(t, ((0, 0), (0, -width % per_block))) for t in table)
    by_head = group.pages.reshape(-1, size, group.pages.shape[3])
    layer_base = layer * group.num_pages * 2 * heads
    head_K1 = jnp.arange(heads, dtype=jnp.int32)[:, None]
    is_float32 = in_float32 or group.codec.dtype == "float32"
    padding = -head_dim % FLOAT32_VALUES if is_float32 else 0

    def fetch(head_page_RKC: jax.Array) -> Elements:
        """[R, K, C*S, H]: contiguous pieces of S vectors, already in the order that the matmul reads."""
        stored = by_head.at[head_page_RKC].get(mode="clip").reshape(num_rows, heads, per_block * size, -1)
        found = group.codec.elements(stored)
        return found._replace(values=found.values.astype(jnp.float32)) if in_float32 else found

    def body(i: jax.Array, state: Softmax) -> Softmax:
        page_RC = jax.lax.dynamic_slice_in_dim(table_RW, i * per_block, per_block, axis=1)
        first_RC = jax.lax.dynamic_slice_in_dim(first_RW, i * per_block, per_block, axis=1)
        slot_J = i * per_block * size + jnp.arange(per_block * size, dtype=jnp.int32)
        held_RJ = slot_J[None, :] < len_R[:, None]
        key_position_RJ = jnp.repeat(first_RC, size, axis=1) + (slot_J % size)[None, :]
        distance_RMJ = position_RM[:, :, None] - key_position_RJ[:, None, :]
        seen_RMJ = held_RJ[:, None, :] & (distance_RMJ >= 0)
        if window is not None:
            seen_RMJ &= distance_RMJ < window
        index_RKC = layer_base + page_RC[:, None, :] * (2 * heads) + head_K1[None]
        keys, values = fetch(index_RKC), fetch(index_RKC + heads)
        # 0 x NaN is NaN: what nobody holds must be cleared from the values, masking the scores is not enough.
        held_RKJ = held_RJ[:, None, :]
        cleared = jnp.where(held_RKJ[..., None], values.values, 0)
        of_slot = (None if x is None else jnp.where(held_RKJ, x, 0.0) for x in values[1:])
        values = Elements(jnp.pad(cleared, ((0, 0), (0, 0), (0, 0), (0, padding))), *of_slot)
        return _accumulate(state, q_RKMH, keys, values, seen_RMJ[:, None])

    low, high = bounds
    block = per_block * size
    empty = Softmax.empty(*q_RKMH.shape[:-1], head_dim + padding)
    state = jax.lax.fori_loop(low // block, (high + block - 1) // block, body, empty)
    return state.result()[..., :head_dim]


def _accumulate(state: Softmax, q: jax.Array, keys: Elements, values: Elements, seen: jax.Array) -> Softmax:
    """One block of keys and values [R, K, J, H] into the running softmax of queries [R, K, M, H].

    Queries and weights are rounded to the dtype of keys and values. Of quantised ones the scales act on columns of
    scores and on weights, the offsets on the sums of both.
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
    scores = jnp.where(seen, scores, MASKED)
    top = jnp.maximum(state.max, scores.max(axis=-1))
    weight = jnp.where(seen, jnp.exp(scores - top[..., None]), 0.0)
    shrink = jnp.exp(state.max - top)
    scaled = weight if values.scale is None else weight * values.scale[:, :, None]
    gained = matmul("rkmj,rkjh->rkmh", scaled.astype(dtype), values.values)
    if values.offset is not None:
        gained += total(weight * values.offset[:, :, None])[..., None]
    return Softmax(top, state.sum * shrink + total(weight), state.acc * shrink[..., None] + gained)
