"""The immutable paged KV state: a pytree of page arrays, page tables and lengths, and pure
functions on it.

Under `jax.jit` with donation every function here updates the pages in place; the value that was
passed in is then dead, and JAX says so when it is touched again.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp

from jaxkv.kv.codecs import Codec, PlainCodec, decode
from jaxkv.kv.layout import HeadMajorLayout, PageLayout
from jaxkv.kv.policies import Measure
from jaxkv.pytree import pytree, static

BEHIND = -(2**30)
"""The position of a table column without a page: behind every window (`EngineConfig.aligned_len`).
"""


@pytree
class Store:
    """Holds the pages of layers that keep keys and values alike, as long as the engine lives.

    pages    [L*P, ..]  the first array of each page, as `layout` says. Page p of layer l is row
             l*P + p: one flat axis, so that a loop over layers carries the pool without copying it.
             `num_layers` is L. Several KV groups may take turns in one store: then a page belongs
             to one of them, and l counts within that group.
    scales   [L*P, ..]  the second array of each page, None where the layout has only one.
    low      older pages of the same rows in a smaller codec, which steps read and never write
             (`kv.policies`); None of an engine that has none. A row's keys are those of both.
    extremes [L*P, 2, K, H] float32: the least and the largest value of each channel over the keys
             of a page, where decoding queries read only `num_read` pages of each row
             (`ops.attention.select`), else None.
    """

    pages: jax.Array
    layout: PageLayout = static()
    num_layers: int = static()
    scales: jax.Array | None = None
    low: Store | None = None
    extremes: jax.Array | None = None
    num_read: int | None = static(default=None)

    @property
    def pools(self) -> tuple[jax.Array, ...]:
        """Lists the arrays that hold keys and values."""
        own = tuple(x for x in (self.pages, self.scales, self.extremes) if x is not None)
        return own if self.low is None else own + self.low.pools

    @property
    def arrays(self) -> tuple[jax.Array, ...]:
        """Lists the arrays of its own pages, in the order of `layout.arrays`."""
        return (self.pages,) if self.scales is None else (self.pages, self.scales)

    def with_arrays(self, pages: jax.Array, scales: jax.Array | None = None) -> Store:
        """Returns the store with other `arrays`."""
        return replace(self, pages=pages, scales=scales)

    @property
    def codec(self) -> Codec:
        return self.layout.codec

    @property
    def num_pages(self) -> int:
        return self.pages.shape[0] // self.num_layers

    @property
    def page_size(self) -> int:
        return self.layout.page_size

    @property
    def num_kv_heads(self) -> int:
        """K of all devices whose pages are seen here: inside of `shard_map` of one."""
        return self.layout.num_kv_heads * self.layout.num_devices(self.pages)


@pytree
class PageTables:
    """Says which pages the rows of one step have, in the KV groups that share a table.

    table_BW int32: page ids of each row in order; entries past the row's length are any valid id,
             never read as data.
    first_BW int32: position (in tokens) of slot 0 of each table page. Masks use it, not the page's
             index, so that a row may drop pages and keep its positions. BEHIND: no page, but
             counted in len_B.
    len_B    int32: tokens of each row that are held, counted in slots from the start of its table.
    low      the same of `Store.low`.
    since_B  int32: the position from which on the queries of each row are observed (`Statistics`);
             None where nothing is. `focused` as there.
    context_B int32: how long each row may get, where rotary embeddings depend on it; else None.
    slot_B   int32: where each row keeps its recurrent state, past the last slot for padding; None
             of a model without.
    after_BA int32: the slots that get the states after each of a row's tokens in a step, in place
             of slot_B; None: that after the last one is kept, in slot_B.
    adapter_B int32: which adapter of the weights each row has, past the last for none; None of an
             engine without adapters.
    """

    table_BW: jax.Array
    first_BW: jax.Array
    len_B: jax.Array
    low: PageTables | None = None
    since_B: jax.Array | None = None
    context_B: jax.Array | None = None
    slot_B: jax.Array | None = None
    after_BA: jax.Array | None = None
    adapter_B: jax.Array | None = None
    focused: bool = static(default=False)


@pytree
class Statistics:
    """Holds what queries have attended to in a step, added up over layers, query heads and the
    queries from position `PageTables.since_B` on.

    mass_BW    softmax weights of each table page, low_BW of each page of `PageTables.low`. With
               `focused` each query head counts as 1 - entropy / log(keys): as nothing where it
               attends to all keys alike.
    entropy_B  entropies of the softmaxes, in nats; None where nobody asks, which `focused` does.
    """

    mass_BW: jax.Array
    low_BW: jax.Array | None
    entropy_B: jax.Array | None
    focused: bool = static()

    @classmethod
    def nothing(cls, tables: PageTables) -> Statistics | None:
        """Returns what has been observed before a step: zeros; None where nothing is observed."""
        if tables.since_B is None:
            return None
        low = tables.low
        return cls(
            mass_BW=jnp.zeros(tables.table_BW.shape, jnp.float32),
            low_BW=None if low is None else jnp.zeros(low.table_BW.shape, jnp.float32),
            entropy_B=jnp.zeros(tables.since_B.shape, jnp.float32) if tables.focused else None,
            focused=tables.focused,
        )


@pytree
class PagedKV:
    """The whole KV state: stores, which live as long as the engine, and the rows of one step.

    By KV group of the model. Where there is one store or one entry of `rows`, all groups share it.
    states: recurrent states, for each entry of `ModelSpec.states` its arrays
    [layers * slots, ..]: slot s of layer l is row l * slots + s.
    num_draft: how many of the stores, the last ones, are of a draft model (`programs.draft`). It
    has its keys and values of a token in the same page and slot as the model, by the same tables.
    """

    stores: tuple[Store, ...]
    rows: tuple[PageTables, ...] = ()
    states: tuple[tuple[jax.Array, ...], ...] = ()
    num_draft: int = static(default=0)

    @property
    def of_model(self) -> PagedKV:
        """Returns the state without what is the draft model's."""
        return replace(self, stores=self.stores[: len(self.stores) - self.num_draft], num_draft=0)

    @property
    def of_draft(self) -> PagedKV:
        """Returns the state of the draft model, which has no adapters."""
        stores = self.stores[len(self.stores) - self.num_draft :]
        return PagedKV(stores, tuple(replace(rows, adapter_B=None) for rows in self.rows))

    def with_model(self, kv: PagedKV) -> PagedKV:
        """Returns the state with this one in place of `of_model`, its rows included."""
        stores = self.stores[len(self.stores) - self.num_draft :]
        return replace(kv, stores=(*kv.stores, *stores), num_draft=self.num_draft)

    def with_draft(self, kv: PagedKV) -> PagedKV:
        """Returns the state with the stores of this one in place of those of `of_draft`."""
        return replace(self, stores=(*self.of_model.stores, *kv.stores))

    @property
    def pools(self) -> list[jax.Array]:
        """Lists all arrays that live from step to step: keys, values and recurrent states."""
        pages = [pool for store in self.stores for pool in store.pools]
        return pages + [array for arrays in self.states for array in arrays]

    @property
    def nbytes(self) -> int:
        """Counts the bytes of the pools, on all devices."""
        return sum(pool.nbytes for pool in self.pools)


def empty_store(
    *,
    num_layers: int,
    layout: PageLayout,
    num_pages: int,
    num_devices: int = 1,
    device: jax.sharding.Sharding | None = None,
) -> Store:
    """Returns zeroed pages: `num_pages` for each of `num_layers` layers, whose heads `num_devices`
    devices divide.
    """
    pools = [
        jnp.zeros(
            (num_layers * num_pages, page.shape[0] * num_devices, *page.shape[1:]),
            page.dtype,
            device=device,
        )
        for page in layout.arrays
    ]
    return Store(
        pools[0],
        layout=layout,
        num_layers=num_layers,
        scales=pools[1] if len(pools) > 1 else None,
    )


def choosing(
    store: Store,
    kv_heads: int,
    head_dim: int,
    *,
    num_read: int,
    device: jax.sharding.Sharding | None = None,
) -> Store:
    """Returns an empty store of which decoding queries read `num_read` pages of each row."""
    extremes = jnp.zeros((store.pages.shape[0], 2, kv_heads, head_dim), jnp.float32, device=device)
    return replace(store, extremes=extremes, num_read=num_read)


def destinations(
    store: Store, tables: PageTables, *, row_T: jax.Array, offset_T: jax.Array
) -> jax.Array:
    """dest_T: page * S + slot for the `offset`-th new token of each row; past the pool for padding.

    row_T is int32 in [0, B), or B for a padding token. Page ids in the table are the host's
    promise.
    """
    num_rows, width = tables.table_BW.shape
    real_T = row_T < num_rows
    row_T = jnp.where(real_T, row_T, 0)
    index_T = tables.len_B[row_T] + offset_T
    page_T = tables.table_BW[row_T, jnp.minimum(index_T // store.page_size, width - 1)]
    dest_T = page_T * store.page_size + index_T % store.page_size
    # A flat pool has no "one past the end" per layer: page P of layer l is page 0 of layer l+1. So
    # padding (and a token past the table's end) points past the pool of one layer here, and `write`
    # turns that into past the whole pool.
    real_T &= index_T < width * store.page_size
    return jnp.where(real_T, dest_T, store.num_pages * store.page_size)


def write(
    store: Store,
    k_TKH: jax.Array,
    v_TKH: jax.Array | None,
    *,
    dest_T: jax.Array,
    layer: int | jax.Array,
) -> Store:
    """Stores one key and one value row per token in its slot, the key alone where it has the value
    (`PageLayout.latent_dim`), behind the keys one more where the layout has it (`has_index_key`); a
    dest_T past the pool is dropped.

    Units: dest_T is page * S + slot; `layer` counts within the KV group. Cost: 2*T*K*H values, in
    place when donated.
    Raises: ValueError if K or H differ from the pool's (when traced), TypeError for pages of which
    only the kernels know the slots. Source: arXiv 2309.06180, section 4.
    """
    layout = store.layout
    if not isinstance(layout, HeadMajorLayout):
        raise TypeError(f"expected pages whose slots XLA can write, got {layout}")
    given = [k_TKH] if v_TKH is None else [k_TKH, v_TKH]
    shapes = [x.shape[1:] for x in given]
    expected = (layout.num_kv_heads, layout.head_dim)
    wanted = [(layout.num_keys, layout.head_dim), expected]
    if shapes != (wanted if layout.latent_dim is None else wanted[:1]):
        what = "keys and values" if layout.latent_dim is None else "keys alone"
        more = " and one more key" if layout.has_index_key else ""
        raise ValueError(f"expected {what} of (K, H) = {expected}{more}, got {shapes}")
    page_T, slot_T = dest_T // store.page_size, dest_T % store.page_size
    row_T = jnp.where(
        page_T < store.num_pages, layer * store.num_pages + page_T, store.pages.shape[0]
    )
    new = layout.encode_tokens(jnp.concatenate(given, axis=1))
    stored = zip(store.arrays, layout.by_slot(store.arrays), new, strict=True)
    # Vector by vector: for [V, H] of a slot at once XLA:TPU would lay out the whole pool anew.
    place_TV = row_T[:, None], jnp.arange(new[0].shape[1])[None], slot_T[:, None]
    written = store.with_arrays(
        *(
            by_slot.at[place_TV].set(of_tokens, mode="drop").reshape(pool.shape)
            for pool, by_slot, of_tokens in stored
        )
    )
    if store.extremes is None:
        return written
    # What is stored counts. A page begins anew with its slot 0.
    k_TKH = decode(store.codec, store.codec.encode(k_TKH))
    begun_T = jnp.where(slot_T == 0, row_T, store.pages.shape[0])
    extremes = store.extremes.at[begun_T].set(
        jnp.array([jnp.inf, -jnp.inf])[None, :, None, None], mode="drop"
    )
    extremes = extremes.at[row_T, 0].min(k_TKH, mode="drop").at[row_T, 1].max(k_TKH, mode="drop")
    return replace(written, extremes=extremes)


def write_entries(
    store: Store, entry_EX: jax.Array, *, dest_E: jax.Array, rate: int, layer: int | jax.Array
) -> Store:
    """Stores entries behind the rows of their `rate` tokens, of which dest_E is the last one's slot
    (as in `write`): an equal part of an entry's numbers behind each. A dest_E past the pool is
    dropped.

    Raises: TypeError for pages of which it does not know the slots, or a codec that rounds a row's
    numbers together.
    """
    layout = store.layout
    if not isinstance(layout, HeadMajorLayout) or layout.latent_dim is None:
        raise TypeError(f"expected rows that XLA can write, got {layout}")
    if not isinstance(layout.codec, PlainCodec):
        raise TypeError(f"expected a codec that keeps each number, got {layout.codec.name}")
    entry_EX = jnp.pad(entry_EX, ((0, 0), (0, -entry_EX.shape[1] % rate)))
    part_TX = entry_EX.reshape(entry_EX.shape[0] * rate, -1)
    is_inside_E = dest_E < store.num_pages * store.page_size
    dest_EP = dest_E[:, None] - jnp.arange(rate - 1, -1, -1)[None]
    row_EP = layer * store.num_pages + dest_EP // store.page_size
    row_EP = jnp.where(is_inside_E[:, None], row_EP, store.pages.shape[0])
    slot_EP = dest_EP % store.page_size
    put = partial(layout.put_ends, x_TX=part_TX, begin=layout.latent_dim)
    return replace(store, pages=put(store.pages, row_EP.ravel(), slot_EP.ravel()))


def demote(kv: PagedKV, source: jax.Array, target: jax.Array) -> PagedKV:
    """Encodes page `source` of every layer anew as page `target` of `low`. Raises: ValueError for
    a store without a `low`.
    """

    def of(store: Store) -> Store:
        if store.low is None:
            raise ValueError("expected a store with a pool of smaller pages, got one without")
        low = store.low
        source_L, target_L = (
            jnp.arange(one.num_layers) * one.num_pages + page
            for one, page in ((store, source), (low, target))
        )
        stored = low.layout.encode(store.layout.decode([x[source_L] for x in store.arrays]))
        pools = (pool.at[target_L].set(x) for pool, x in zip(low.arrays, stored, strict=True))
        return replace(store, low=low.with_arrays(*pools))

    return replace(kv, stores=tuple(map(of, kv.stores)))


def measure_pages(kv: PagedKV, page_W: jax.Array, *, measure: Measure) -> jax.Array:
    """Returns what `measure` (`kv.policies`) says of each of these pages, [W, ...], means over
    layers. Cost: reads the pages, one layer at a time.
    """
    found = []
    for store in kv.stores:

        def of_layer(layer: jax.Array, store: Store = store) -> jax.Array:
            row_W = layer * store.num_pages + page_W
            x = store.layout.decode([pool[row_W] for pool in store.arrays])
            k_WKSH, v_WKSH = (
                y.reshape(y.shape[0], -1, *y.shape[3:]) for y in store.layout.split(x)
            )
            return measure(k_WKSH, v_WKSH)

        found.append(jax.lax.map(of_layer, jnp.arange(store.num_layers)).sum(axis=0))
    return sum(found[1:], found[0]) / sum(store.num_layers for store in kv.stores)


def copy_state(kv: PagedKV, source: jax.Array, target: jax.Array, *, num_slots: int) -> PagedKV:
    """Copies the recurrent state of one slot to another one, in all layers."""

    def of(array: jax.Array) -> jax.Array:
        layer_L = jnp.arange(array.shape[0] // num_slots, dtype=jnp.int32) * num_slots
        return array.at[layer_L + target].set(array[layer_L + source])

    return replace(kv, states=jax.tree.map(of, kv.states))


def copy_pages(kv: PagedKV, source_C: jax.Array, target_C: jax.Array) -> PagedKV:
    """Copies whole pages, all layers of every store: what a fork does to the one partly filled tail
    page.

    source_C, target_C: int32 page ids; a target past the pool is dropped (padding).
    """

    def copy(store: Store) -> Store:
        base_L1 = jnp.arange(store.num_layers, dtype=jnp.int32)[:, None] * store.num_pages
        inside_1C = (target_C < store.num_pages)[None, :]
        target_LC = jnp.where(inside_1C, base_L1 + target_C[None, :], store.pages.shape[0])
        source_LC = base_L1 + jnp.where(inside_1C, source_C[None, :], 0)

        pages = store.pages.at[target_LC].set(store.pages[source_LC], mode="drop")
        if store.extremes is not None:
            extremes = store.extremes.at[target_LC].set(store.extremes[source_LC], mode="drop")
            return replace(store, pages=pages, extremes=extremes)
        if store.scales is None:
            return replace(store, pages=pages)

        # Row by row: XLA:TPU would lay out all of them anew for a gather.
        scales, rows = (
            store.scales,
            jax.lax.map(partial(jax.lax.dynamic_index_in_dim, store.scales), source_LC.ravel()),
        )

        def put(i: jax.Array, scales: jax.Array) -> jax.Array:
            target = target_LC.ravel()[i]
            row = jnp.where(
                target < scales.shape[0], rows[i], jax.lax.dynamic_index_in_dim(scales, target)
            )
            return jax.lax.dynamic_update_slice_in_dim(scales, row, target, 0)

        return replace(store, pages=pages, scales=jax.lax.fori_loop(0, source_LC.size, put, scales))

    return replace(kv, stores=tuple(map(copy, kv.stores)))
