"""Sweeps over blocks of pages in plain XLA: which keys queries see, how a block is gathered, and
the running softmax over blocks (arXiv 2205.14135, algorithm 1).
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxkv.axes import MeshAxes
from jaxkv.kv.codecs import Elements, decode_elements
from jaxkv.kv.layout import HeadMajorLayout, once
from jaxkv.kv.state import BEHIND, PageTables, Store
from jaxkv.ops.attention.base import Place
from jaxkv.ops.attention.distances import Distances
from jaxkv.ops.attention.divided import choose_of_all, share_of
from jaxkv.ops.attention.index import BlockIndex, Change, Choice, EntryShape
from jaxkv.ops.attention.softmax import MASKED, Found, Rows, Softmax, Tally
from jaxkv.ops.layers import soft_cap, total

BLOCK = 128
"""Keys gathered per row and iteration on a CPU, for decode rows and prefill chunks alike: both add
up in the same order.
"""

FLOAT32_VALUES = 64
"""Float32 values are padded to a multiple: XLA:CPU adds up the product of a few queries and other
widths in another order than that of many.
"""

Window = int | jax.Array | None
"""How many tokens a query sees, itself included, or are in a chunk; None: all before it."""


class Scores(NamedTuple):
    """Says what becomes of scores: which keys are seen, and cap and sinks as in `Terms`, these by
    KV head. entry: of entries beside the keys (`index.Entries`), None where there are none. choice:
    of entries, if there are any, or of keys, by the tokens of the queries; None: of all. distances:
    as in `Terms`, of the tokens of the queries. tokens_over: the mesh axis over whose devices the
    tokens of each page are divided; None: each device has them all.
    """

    window: Window
    chunk: Window
    cap: float
    sinks_KG: jax.Array | None
    entry: EntryShape | None = None
    choice: Choice | None = None
    distances: Distances | None = None
    tokens_over: MeshAxes | None = None

    def with_tokens(self, change: Change) -> Scores:
        """Returns it for other tokens, which `change` makes of arrays [T, ..]."""
        choice = None if self.choice is None else self.choice.with_tokens(change)
        distances = None if self.distances is None else self.distances.with_tokens(change)
        return self._replace(choice=choice, distances=distances)

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

    def sinks(self, like: tuple[int, ...]) -> list[jax.Array]:
        """Lists the scores of keys that are not there, each in an array of queries like [R, K, M]:
        one that every query of a head sees alike, and one that each token decides.
        """
        found = [] if self.distances is None else [self.distances.sinks(like)]
        if self.sinks_KG is not None:
            times = -(-like[2] // self.sinks_KG.shape[1])
            score_KM = jnp.tile(self.sinks_KG.astype(jnp.float32), (1, times))[:, : like[2]]
            found.append(jnp.broadcast_to(score_KM, like))
        return [score_RKM for score_RKM in found if score_RKM is not None]

    def by_distance(
        self, position_RM: jax.Array, key_position_RKJ: jax.Array, like: tuple[int, ...]
    ) -> jax.Array | None:
        """Returns what the distance to a key adds to the score of each query, in an array of
        queries like [R, K, M, H], whose last ones may be padding; None for nothing.
        """
        if self.distances is None:
            return None
        num_rows, num_kv_heads, num_queries, _ = like
        each = len(self.distances.weight_TNR) // num_rows
        position_RT = position_RM[:, :: position_RM.shape[1] // each]
        distance_RTKJ = position_RT[:, :, None, None] - key_position_RKJ[:, None]
        score_RKMJ = self.distances.scores(distance_RTKJ, num_kv_heads)
        missing = num_queries - score_RKMJ.shape[2]
        return jnp.pad(score_RKMJ, ((0, 0), (0, 0), (0, missing), (0, 0)))


class Chosen(NamedTuple):
    """Says what of a row's table its tokens have chosen, each KV head for itself or all alike:
    `pool` slots at a time.
    """

    chosen_RTKC: jax.Array
    pool: int

    def of_queries(self, start: jax.Array, num_slots: int, num_queries: int) -> jax.Array:
        """Returns which of so many slots each of a KV head's queries has chosen, [R, K, M, J]."""
        own_RTKC = jax.lax.dynamic_slice_in_dim(
            self.chosen_RTKC, start // self.pool, num_slots // self.pool, axis=3
        )
        own_RKTJ = jnp.repeat(own_RTKC.swapaxes(1, 2), self.pool, axis=3)
        return jnp.repeat(own_RKTJ, num_queries // own_RKTJ.shape[2], axis=2)


class Blocking(NamedTuple):
    """Says how a sweep goes: over so many keys of a row at a time, as the pages decode to or in
    float32.
    """

    num_keys: int = BLOCK
    in_float32: bool = False


def rows_of(
    store: Store, tables: PageTables, window: Window, tokens_over: MeshAxes | None = None
) -> Rows:
    """Returns the pages of all rows. tokens_over: as in `Scores`; then the store has this device's
    tokens of each page alone.
    """
    low = None
    if store.low is not None and tables.low is not None:
        low = rows_of(store.low, tables.low, None)
    share = share_of(store, tokens_over)
    table_BW, first_BW = jnp.asarray(tables.table_BW), jnp.asarray(tables.first_BW)
    begin_W = jnp.arange(table_BW.shape[1], dtype=jnp.int32) * share.page_size + share.begin
    held_BW = jnp.clip(tables.len_B[:, None] - begin_W[None], 0, store.page_size)
    if window is not None:
        held_BW = jnp.where(first_BW == BEHIND, 0, held_BW)
    return Rows(table_BW[:, None], (first_BW + share.begin)[:, None], held_BW[:, None], low)


class Block(NamedTuple):
    """Holds the keys and values [R, K, J, H] of a block of slots, zeros for values that nobody
    holds; which slots are held, and their positions.
    """

    keys: Elements
    values: Elements
    held_RKJ: jax.Array
    position_RKJ: jax.Array


class Blocks(NamedTuple):
    """Reads the slots of R rows' tables in blocks of whole pages, which begin at multiples of their
    size; or the entries that are behind the rows of their tokens.
    """

    store: Store
    rows: Rows
    layer: int | jax.Array
    num_pages: int
    in_float32: bool
    entry: EntryShape | None = None

    @classmethod
    def of(
        cls,
        store: Store,
        rows: Rows,
        layer: int | jax.Array,
        *,
        size: int,
        in_float32: bool,
        entry: EntryShape | None = None,
    ) -> Blocks:
        """Cuts tables into blocks of `size` slots; of fewer, but a multiple of BLOCK, where tables
        have fewer.
        """
        longest = -(-rows.table_RKW.shape[2] * store.page_size // BLOCK) * BLOCK
        num_pages = max(1, min(size, longest) // store.page_size)
        missing = -rows.table_RKW.shape[2] % num_pages
        table, first, held = (jnp.pad(x, ((0, 0), (0, 0), (0, missing))) for x in rows[:3])
        return cls(store, Rows(table, first, held, None), layer, num_pages, in_float32, entry)

    @property
    def num_blocks(self) -> int:
        """Returns how many blocks whole tables have."""
        return self.rows.table_RKW.shape[2] // self.num_pages

    @property
    def size(self) -> int:
        """Returns how many slots a block has."""
        return self.num_pages * self.store.page_size

    @property
    def num_keys(self) -> int:
        """Returns how many keys, or entries, a block has."""
        return self.size // (1 if self.entry is None else self.entry.rate)

    def covering(self, low: jax.Array, high: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the range of the blocks that have slots low..high-1."""
        return low // self.size, (high + self.size - 1) // self.size

    def read(self, i: jax.Array) -> Block:
        """Gathers block i: contiguous pieces of a page's vectors, already in the order that the
        matmul reads.
        """
        if self.entry is not None:
            entry, held_RKJ, position_RKJ = self._entries(i, self.entry)
            missing = self.store.layout.head_dim - (self.store.layout.latent_dim or 0)
            row = jnp.pad(entry[..., : self.store.layout.latent_dim], (*[(0, 0)] * 3, (0, missing)))
            return Block(Elements(row), Elements(row), held_RKJ, position_RKJ)
        page_RKC, held_RKJ, position_RKJ = self._slots(i)
        keys, values = map(self._elements, self._layout.gather(self.store.pages, page_RKC))
        # 0 x NaN is NaN: what nobody holds must be cleared from the values, masking the scores is
        # not enough.
        cleared = jnp.where(held_RKJ[..., None], values.values, 0)
        of_slot = (None if x is None else jnp.where(held_RKJ, x, 0.0) for x in values[1:])
        return Block(keys, Elements(cleared, *of_slot), held_RKJ, position_RKJ)

    def read_index(self, i: jax.Array, key_dim: int) -> Block:
        """Gathers of block i what keys are chosen by, as keys [R, 1, J, X]; no values."""
        if self.entry is not None:
            entry, held_RKJ, position_RKJ = self._entries(i, self.entry)
            key = entry[..., self.store.layout.latent_dim :][..., :key_dim].astype(jnp.float32)
            return Block(Elements(key), Elements(key[..., :0]), held_RKJ, position_RKJ)
        page_RKC, held_RKJ, position_RKJ = self._slots(i)
        layout = self._layout
        vector = layout.num_kv_heads if layout.has_index_key else 0
        found = self._elements(layout.gather_vectors(self.store.pages, page_RKC, [vector]))
        whole = decode_elements(self.store.codec, found)
        key = whole[..., :key_dim] if layout.has_index_key else whole[..., -key_dim:]
        return Block(Elements(key), Elements(key[..., :0]), held_RKJ, position_RKJ)

    def _entries(self, i: jax.Array, asked: EntryShape) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Gathers the entries of block i, [R, 1, J, X], zeros where they are not whole; which are,
        and the positions of their last tokens.
        """
        page_R1C, held_R1J, position_R1J = self._slots(i)
        begin, num_rows = self._layout.latent_dim or 0, page_R1C.shape[0]
        ends = self._layout.gather_ends(self.store.pages, page_R1C.ravel(), begin)
        ends = self.store.codec.elements(ends).values
        entry = ends[..., : asked.width].reshape(num_rows, 1, -1, asked.rate * asked.width)
        entry = entry[..., : asked.size]
        last = slice(asked.rate - 1, None, asked.rate)
        held_R1J, position_R1J = held_R1J[..., last], position_R1J[..., last]
        entry = jnp.where(held_R1J[..., None], entry, 0)
        return entry.astype(jnp.float32) if self.in_float32 else entry, held_R1J, position_R1J

    def _slots(self, i: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns which rows of the pool are block i, which of their slots are held, and the
        positions of these.
        """
        store, num_pages, size = self.store, self.num_pages, self.store.page_size
        take = partial(
            jax.lax.dynamic_slice_in_dim, start_index=i * num_pages, slice_size=num_pages, axis=2
        )
        page_RKC, first_RKC, in_page_RKC = map(take, self.rows[:3])
        slot_1J = jnp.tile(jnp.arange(size, dtype=jnp.int32), num_pages)[None, None]
        held_RKJ = once(slot_1J < jnp.repeat(in_page_RKC, size, axis=2))
        position_RKJ = once(jnp.repeat(first_RKC, size, axis=2) + slot_1J)
        return self.layer * store.num_pages + page_RKC, held_RKJ, position_RKJ

    @property
    def _layout(self) -> HeadMajorLayout:
        layout = self.store.layout
        if not isinstance(layout, HeadMajorLayout):
            raise TypeError(f"expected pages that XLA can read head by head, got {layout}")
        return layout

    def _elements(self, stored_RKCSX: jax.Array) -> Elements:
        num_rows, heads = stored_RKCSX.shape[:2]
        found = self.store.codec.elements(stored_RKCSX.reshape(num_rows, heads, self.size, -1))
        if not self.in_float32:
            return found
        return found._replace(values=found.values.astype(jnp.float32))


def attend(
    q_RKMH: jax.Array,
    at: Place,
    rows: Rows,
    position_RM: jax.Array,
    bounds: tuple[jax.Array, jax.Array],
    *,
    blocking: Blocking,
    asked: Scores,
) -> tuple[jax.Array, Found | None]:
    """Sweeps over the pages of both pools. Returns [R, K, M, H], and what `at.statistics` wants.

    The M queries of a KV head are of its G heads by turns: query m of head m mod G. Their tokens
    are those of one row or one of each. Where devices divide the tokens of pages the queries are of
    all heads, and what it returns is this device's part of a sum over all devices.
    """
    if asked.tokens_over is not None:
        bounds = share_of(at.store, asked.tokens_over).covering(*bounds, at.store)
    sweep = partial(_sweep_chosen, blocking=blocking)
    if asked.entry is not None:  # what is chosen are entries
        all_before = jnp.int32(0), bounds[1]
        of_entries, _ = sweep(
            q_RKMH, at, rows, position_RM, all_before, asked=asked._replace(window=None)
        )
        near = asked._replace(entry=None, choice=None)
        softmax, own = sweep(q_RKMH, at, rows, position_RM, bounds, asked=near)
        softmax = softmax.merged(of_entries)
    else:
        softmax, own = sweep(q_RKMH, at, rows, position_RM, bounds, asked=asked)
    low, of_low = at.store.low, None
    if low is not None and rows.low is not None:
        # The store's own codec rotates nothing (`kv.policies`).
        codec, all_slots = low.codec, (jnp.int32(0), jnp.max(rows.low.held_RKW.sum(axis=2)))
        at_low = at._replace(store=low)
        of_row = codec.rotate(q_RKMH), at_low, rows.low, position_RM, all_slots
        found, of_low = _sweep(*of_row, blocking=blocking, asked=asked)
        softmax = softmax.merged(found._replace(acc=codec.restore(found.acc)))
    if asked.tokens_over is not None:
        softmax = softmax.over(asked.tokens_over)
    for sink_RKM in asked.sinks(softmax.max.shape):
        softmax = softmax.merged(_sink(sink_RKM, softmax))
    return softmax.result(), None if own is None else Found(softmax, own, of_low)


def _sweep_chosen(
    q_RKMH: jax.Array,
    at: Place,
    rows: Rows,
    position_RM: jax.Array,
    bounds: tuple[jax.Array, jax.Array],
    *,
    blocking: Blocking,
    asked: Scores,
) -> tuple[Softmax, Tally | None]:
    """Sweeps as `_sweep` does, over what is chosen."""
    index, chosen = asked.choice, None
    if index is not None:
        score_RTKC = _score(index, at, rows, position_RM, bounds, blocking.num_keys, asked)
        if isinstance(index, BlockIndex) and _reads_chosen(index, score_RTKC, at.store.page_size):
            rows = _chosen_rows(index, score_RTKC[:, 0], rows, at.store.page_size)
            bounds = jnp.int32(0), jnp.minimum(bounds[1], index.num_chosen * index.pool)
        elif asked.tokens_over is not None:
            chosen = Chosen(
                choose_of_all(index, score_RTKC, at.store, asked.tokens_over), index.pool
            )
        else:
            chosen = Chosen(index.choose(score_RTKC), index.pool)
    of_rows = q_RKMH, at, rows, position_RM, bounds
    return _sweep(*of_rows, blocking=blocking, asked=asked, chosen=chosen)


def _reads_chosen(index: BlockIndex, score_RTKC: jax.Array, page_size: int) -> bool:
    """Says whether only chosen blocks are read, which are whole pages then: where each row has one
    token, and the order in which keys are added up stays what it is with all blocks.
    """
    _, num_tokens, _, num_blocks = score_RTKC.shape
    is_whole = index.pool == BLOCK and BLOCK % page_size == 0
    return is_whole and num_tokens == 1 and num_blocks > index.num_chosen


def _chosen_rows(index: BlockIndex, score_RKC: jax.Array, rows: Rows, page_size: int) -> Rows:
    """Returns tables that have, for each KV head, the pages of the blocks that it has chosen."""
    block_RKc, each = index.best(score_RKC), index.pool // page_size
    page_RKcP = block_RKc[..., None] * each + jnp.arange(each)[None, None, None]
    page_RKw = page_RKcP.reshape(*block_RKc.shape[:2], -1)
    missing = score_RKC.shape[2] * each - rows.table_RKW.shape[2]

    def of(x_RKW: jax.Array) -> jax.Array:
        x_RKW = jnp.pad(x_RKW, ((0, 0), (0, 0), (0, missing)))
        whole = (*page_RKw.shape[:2], x_RKW.shape[2])
        return jnp.take_along_axis(jnp.broadcast_to(x_RKW, whole), page_RKw, axis=2)

    return Rows(of(rows.table_RKW), of(rows.first_RKW), of(rows.held_RKW), None)


def _score(
    index: Choice,
    at: Place,
    rows: Rows,
    position_RM: jax.Array,
    bounds: tuple[jax.Array, jax.Array],
    num_keys: int,
    asked: Scores,
) -> jax.Array:
    """Returns how each row's T tokens score what they could choose of its table, [R, T, K or 1, C]:
    -inf for what they do not see. C counts `index.pool` slots each.
    """
    num_rows, each = position_RM.shape[0], index.num_tokens // position_RM.shape[0]
    position_RT = position_RM[:, :: position_RM.shape[1] // each]
    blocks = Blocks.of(at.store, rows, at.layer, size=num_keys, in_float32=True, entry=asked.entry)
    size = blocks.num_keys // index.pool  # of what is scored in a block

    def body(i: jax.Array, score_RTKC: jax.Array) -> jax.Array:
        found = blocks.read_index(i, index.key_dim)
        key_RJX, position_RJ = found.keys.values[:, 0], found.position_RKJ[:, 0]
        seen_RTJ = asked.seen(position_RT, found.position_RKJ, found.held_RKJ)[:, 0]
        score_RTKc = index.scores(key_RJX, seen_RTJ, position_RT, position_RJ)
        return jax.lax.dynamic_update_slice_in_dim(score_RTKC, score_RTKc, i * size, axis=3)

    shape = (num_rows, each, index.num_groups, blocks.num_blocks * size)
    empty = jnp.full(shape, -jnp.inf)
    return jax.lax.fori_loop(*blocks.covering(*bounds), body, empty)


def _sink(score_RKM: jax.Array, like: Softmax) -> Softmax:
    """Returns the softmax over a key of value 0 that queries see with these scores. Source: arXiv
    2309.17453, section 3.3, as gpt-oss learns them.
    """
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
    blocking: Blocking,
    asked: Scores,
    chosen: Chosen | None = None,
) -> tuple[Softmax, Tally | None]:
    """Attends M queries per KV head of R rows over slots bounds[0]..bounds[1]-1 of their tables,
    counted as if all pages were full, `num_keys` of them (or one page) at a time.

    Both matmuls take their inputs in the dtype that the pages decode to, or float32, and add up in
    float32. Blocks begin at multiples of their size, and one without a seen key changes no bit:
    what a query gets does not depend on the bounds.

    position_RM has the position of each query, or [R, 1] where all queries of a row share it.
    chosen: the slots that each token's queries see at most.
    """
    head_dim, wanted, (num_keys, in_float32) = q_RKMH.shape[3], at.statistics, blocking
    blocks = Blocks.of(
        at.store, rows, at.layer, size=num_keys, in_float32=in_float32, entry=asked.entry
    )
    is_float32 = in_float32 or at.store.codec.dtype == "float32"
    padding = -head_dim % FLOAT32_VALUES if is_float32 else 0

    def body(i: jax.Array, carry: tuple[Softmax, Tally | None]) -> tuple[Softmax, Tally | None]:
        state, tally = carry
        found = blocks.read(i)
        seen_RKMJ = asked.seen(position_RM, found.position_RKJ, found.held_RKJ)
        if chosen is not None:
            of_block = i * blocks.num_keys, blocks.num_keys
            seen_RKMJ = seen_RKMJ & chosen.of_queries(*of_block, q_RKMH.shape[2])
        seen_RKMJ = once(seen_RKMJ)
        padded = jnp.pad(found.values.values, ((0, 0), (0, 0), (0, 0), (0, padding)))
        values = found.values._replace(values=padded)
        added = asked.by_distance(position_RM, found.position_RKJ, q_RKMH.shape)
        terms = seen_RKMJ, asked.cap, added
        state, weight = accumulate(state, q_RKMH, found.keys, values, *terms)
        if tally is not None:
            tally = tally.with_block(i, weight, state.max, seen_RKMJ[:, 0])
        return state, tally

    tally = None
    if wanted is not None:
        shape = (blocks.num_blocks, *q_RKMH.shape[:-1], blocks.num_pages)
        tally = Tally.empty(shape, position_RM)
    entropy = wanted is not None and wanted.entropy_B is not None
    empty = Softmax.empty(*q_RKMH.shape[:-1], head_dim + padding, entropy=entropy)
    first, end = blocks.covering(*bounds)
    state, tally = jax.lax.fori_loop(first, end, body, (empty, tally))
    return state._replace(acc=state.acc[..., :head_dim]), tally


def accumulate(
    state: Softmax,
    q: jax.Array,
    keys: Elements,
    values: Elements,
    seen: jax.Array,
    cap: float,
    added: jax.Array | None = None,
) -> tuple[Softmax, jax.Array]:
    """Adds one block of keys and values [R, K, J, H] into the running softmax of queries [R, K, M,
    H], whose scores get what is `added`. Returns the weights [R, K, M, J] too.

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
    if added is not None:
        scores += added
    scores = jnp.where(seen, scores, MASKED)
    top = jnp.maximum(state.max, scores.max(axis=-1))
    # What is not seen gets weight 0, also where nothing is and the largest score is MASKED itself.
    weight = jnp.exp(scores - jnp.maximum(top, MASKED / 2)[..., None])
    # XLA:CPU would compute the exponentials anew for each of their sums.
    weight = jax.lax.optimization_barrier(weight)
    before = state.moved(top)
    scaled = weight if values.scale is None else weight * values.scale[:, :, None]
    gained = matmul("rkmj,rkjh->rkmh", scaled.astype(dtype), values.values)
    if values.offset is not None:
        gained += total(weight * values.offset[:, :, None])[..., None]
    entropy = before.entropy
    if entropy is not None:
        # What is not seen has weight 0 and a finite score.
        entropy += total(weight * (scores - top[..., None]))
    return Softmax(top, before.sum + total(weight), before.acc + gained, entropy), weight
