"""The immutable paged KV state: a pytree of page arrays, page tables and lengths, and pure
functions on it.

Under `jax.jit` with donation every function here updates the pages in place; the value that was
passed in is then dead, and JAX says so when it is touched again.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxkv.kv.codecs import Codec, decode
from jaxkv.kv.layout import HeadMajorLayout, PageLayout
from jaxkv.kv.policies import Measure

BEHIND = -(2**30)
"""The position of a table column without a page: behind every window (`EngineConfig.aligned_len`).
"""


@struct.dataclass
class Statistics:
    """Holds what queries have attended to, added up over layers, query heads and the queries from
    position since_B [B] on.

    mass_BW    softmax weights of each table page, low_BW of each page of `GroupKV.low`. With
               `focused` each query head counts as 1 - entropy / log(keys): as nothing where it
               attends to all keys alike.
    entropy_B  entropies of the softmaxes, in nats; None where nobody asks, which `focused` does.
    """

    mass_BW: jax.Array
    low_BW: jax.Array | None
    entropy_B: jax.Array | None
    since_B: jax.Array
    focused: bool = struct.field(pytree_node=False)


@struct.dataclass
class GroupKV:
    """Pages of one KV group (layers with one cache shape, retention and codec), and who owns them
    in this step.

    pages    [L*P, ..]  the first array of each page, as `layout` says. Page p of layer l is row
             l*P + p: one flat axis, so that a loop over layers carries the pool without copying it.
    table_BW int32: page ids of each row in order; entries past the row's length are any valid id,
    never read as data.
    first_BW int32: position (in tokens) of slot 0 of each table page. Masks use it, not the page's
             index, so that a row may drop pages and keep its positions. BEHIND: no page, but
             counted in len_B.
    len_B    int32: tokens of each row that are held, counted in slots from the start of its table.
    scales   [L*P, ..]  the second array of each page, None where the layout has only one.
    low      older pages of the same rows in a smaller codec, which steps read and never write
             (`kv.policies`); None of an engine that has none. A row's keys are those of both.
    statistics  what steps add up while they attend, None where nobody asks.
    extremes [L*P, 2, K, H] float32: the least and the largest value of each channel over the keys
             of a page, where decoding queries read only `num_read` pages of each row
             (`ops.attention.select`), else None.
    """

    pages: jax.Array
    table_BW: jax.Array
    first_BW: jax.Array
    len_B: jax.Array
    layout: PageLayout = struct.field(pytree_node=False)
    num_layers: int = struct.field(pytree_node=False)
    scales: jax.Array | None = None
    low: GroupKV | None = None
    statistics: Statistics | None = None
    extremes: jax.Array | None = None
    num_read: int | None = struct.field(pytree_node=False, default=None)

    @property
    def pools(self) -> tuple[jax.Array, ...]:
        """Lists the arrays that hold keys and values."""
        own = tuple(x for x in (self.pages, self.scales, self.extremes) if x is not None)
        return own if self.low is None else own + self.low.pools

    @property
    def arrays(self) -> tuple[jax.Array, ...]:
        """Lists the arrays of its own pages, in the order of `layout.arrays`."""
        return (self.pages,) if self.scales is None else (self.pages, self.scales)

    def with_arrays(self, pages: jax.Array, scales: jax.Array | None = None) -> GroupKV:
        """Returns the group with other `arrays`."""
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


@struct.dataclass
class PagedKV:
    """The whole KV state: one `GroupKV` per KV group of the model."""

    groups: tuple[GroupKV, ...]

    @property
    def pools(self) -> list[jax.Array]:
        """Lists all arrays that hold keys and values."""
        return [pool for group in self.groups for pool in group.pools]

    @property
    def nbytes(self) -> int:
        """Counts the bytes of the pools, on all devices."""
        return sum(pool.nbytes for pool in self.pools)


def empty_group(
    *,
    num_layers: int,
    layout: PageLayout,
    num_pages: int,
    num_devices: int = 1,
    device: jax.sharding.Sharding | None = None,
) -> GroupKV:
    """Returns a zeroed pool without rows: `num_pages` pages for each of `num_layers` layers, whose
    heads `num_devices` devices divide.
    """
    pools = [
        jnp.zeros(
            (num_layers * num_pages, page.shape[0] * num_devices, *page.shape[1:]),
            page.dtype,
            device=device,
        )
        for page in layout.arrays
    ]
    no_rows: Any = np.zeros((0, 1), np.int32)
    return GroupKV(
        pools[0],
        table_BW=no_rows,
        first_BW=no_rows,
        len_B=no_rows[:, 0],
        layout=layout,
        num_layers=num_layers,
        scales=pools[1] if len(pools) > 1 else None,
    )


def choosing(
    group: GroupKV,
    kv_heads: int,
    head_dim: int,
    *,
    num_read: int,
    device: jax.sharding.Sharding | None = None,
) -> GroupKV:
    """Returns an empty group of which decoding queries read `num_read` pages of each row."""
    extremes = jnp.zeros((group.pages.shape[0], 2, kv_heads, head_dim), jnp.float32, device=device)
    return replace(group, extremes=extremes, num_read=num_read)


def destinations(group: GroupKV, *, row_T: jax.Array, offset_T: jax.Array) -> jax.Array:
    """dest_T: page * S + slot for the `offset`-th new token of each row; past the pool for padding.

    row_T is int32 in [0, B), or B for a padding token. Page ids in the table are the host's
    promise.
    """
    num_rows, width = group.table_BW.shape
    real_T = row_T < num_rows
    row_T = jnp.where(real_T, row_T, 0)
    index_T = group.len_B[row_T] + offset_T
    page_T = group.table_BW[row_T, jnp.minimum(index_T // group.page_size, width - 1)]
    dest_T = page_T * group.page_size + index_T % group.page_size
    # A flat pool has no "one past the end" per layer: page P of layer l is page 0 of layer l+1. So
    # padding (and a token past the table's end) points past the pool of one layer here, and `write`
    # turns that into past the whole pool.
    real_T &= index_T < width * group.page_size
    return jnp.where(real_T, dest_T, group.num_pages * group.page_size)


def write(
    group: GroupKV, k_TKH: jax.Array, v_TKH: jax.Array, *, dest_T: jax.Array, layer: int | jax.Array
) -> GroupKV:
    """Stores one key and one value row per token in its slot; a dest_T past the pool is dropped.

    Units: dest_T is page * S + slot; `layer` counts within the group. Cost: 2*T*K*H values, in
    place when donated.
    Raises: ValueError if K or H differ from the pool's (when traced), TypeError for pages of which
    only the kernels know the slots. Source: arXiv 2309.06180, section 4.
    """
    layout = group.layout
    if not isinstance(layout, HeadMajorLayout):
        raise TypeError(f"expected pages whose slots XLA can write, got {layout}")
    expected = (layout.num_kv_heads, layout.head_dim)
    if {x.shape[1:] for x in (k_TKH, v_TKH)} != {expected}:
        raise ValueError(
            f"expected keys and values of (K, H) = {expected}, got {k_TKH.shape[1:]} and "
            f"{v_TKH.shape[1:]}"
        )
    page_T, slot_T = dest_T // group.page_size, dest_T % group.page_size
    row_T = jnp.where(
        page_T < group.num_pages, layer * group.num_pages + page_T, group.pages.shape[0]
    )
    new = layout.encode_tokens(k_TKH, v_TKH)
    stored = zip(group.arrays, layout.by_slot(group.arrays), new, strict=True)
    written = group.with_arrays(
        *(
            by_slot.at[row_T, :, slot_T].set(of_tokens, mode="drop").reshape(pool.shape)
            for pool, by_slot, of_tokens in stored
        )
    )
    if group.extremes is None:
        return written
    # What is stored counts. A page begins anew with its slot 0.
    keys = layout.keys
    k_TKH = decode(group.codec, new[0][:, keys.start : keys.stop])
    begun_T = jnp.where(slot_T == 0, row_T, group.pages.shape[0])
    extremes = group.extremes.at[begun_T].set(
        jnp.array([jnp.inf, -jnp.inf])[None, :, None, None], mode="drop"
    )
    extremes = extremes.at[row_T, 0].min(k_TKH, mode="drop").at[row_T, 1].max(k_TKH, mode="drop")
    return replace(written, extremes=extremes)


def demote(kv: PagedKV, source: jax.Array, target: jax.Array) -> PagedKV:
    """Encodes page `source` of every layer anew as page `target` of `low`. Raises: ValueError for
    a group without a `low`.
    """

    def of(group: GroupKV) -> GroupKV:
        if group.low is None:
            raise ValueError("expected a KV group with a pool of smaller pages, got one without")
        low = group.low
        source_L, target_L = (
            jnp.arange(one.num_layers) * one.num_pages + page
            for one, page in ((group, source), (low, target))
        )
        stored = low.layout.encode(group.layout.decode([x[source_L] for x in group.arrays]))
        pools = (pool.at[target_L].set(x) for pool, x in zip(low.arrays, stored, strict=True))
        return replace(group, low=low.with_arrays(*pools))

    return replace(kv, groups=tuple(map(of, kv.groups)))


def measure_pages(kv: PagedKV, page_W: jax.Array, *, measure: Measure) -> jax.Array:
    """Returns what `measure` (`kv.policies`) says of each of these pages, [W, ...], means over
    layers. Cost: reads the pages, one layer at a time.
    """
    found = []
    for group in kv.groups:

        def of_layer(layer: jax.Array, group: GroupKV = group) -> jax.Array:
            row_W = layer * group.num_pages + page_W
            x = group.layout.decode([pool[row_W] for pool in group.arrays])
            x = x.reshape(*x.shape[:2], 2, -1, *x.shape[3:])
            k_WKSH, v_WKSH = (x[:, :, i].reshape(x.shape[0], -1, *x.shape[4:]) for i in (0, 1))
            return measure(k_WKSH, v_WKSH)

        found.append(jax.lax.map(of_layer, jnp.arange(group.num_layers)).sum(axis=0))
    return sum(found[1:], found[0]) / sum(group.num_layers for group in kv.groups)


def copy_pages(kv: PagedKV, source_C: jax.Array, target_C: jax.Array) -> PagedKV:
    """Copies whole pages, all layers of every group: what a fork does to the one partly filled tail
    page.

    source_C, target_C: int32 page ids; a target past the pool is dropped (padding).
    """

    def copy(group: GroupKV) -> GroupKV:
        base_L1 = jnp.arange(group.num_layers, dtype=jnp.int32)[:, None] * group.num_pages
        inside_1C = (target_C < group.num_pages)[None, :]
        target_LC = jnp.where(inside_1C, base_L1 + target_C[None, :], group.pages.shape[0])
        source_LC = base_L1 + jnp.where(inside_1C, source_C[None, :], 0)

        pages = group.pages.at[target_LC].set(group.pages[source_LC], mode="drop")
        if group.extremes is not None:
            extremes = group.extremes.at[target_LC].set(group.extremes[source_LC], mode="drop")
            return replace(group, pages=pages, extremes=extremes)
        if group.scales is None:
            return replace(group, pages=pages)

        # Row by row: XLA:TPU would lay out all of them anew for a gather.
        scales, rows = (
            group.scales,
            jax.lax.map(partial(jax.lax.dynamic_index_in_dim, group.scales), source_LC.ravel()),
        )

        def put(i: jax.Array, scales: jax.Array) -> jax.Array:
            target = target_LC.ravel()[i]
            row = jnp.where(
                target < scales.shape[0], rows[i], jax.lax.dynamic_index_in_dim(scales, target)
            )
            return jax.lax.dynamic_update_slice_in_dim(scales, row, target, 0)

        return replace(group, pages=pages, scales=jax.lax.fori_loop(0, source_LC.size, put, scales))

    return replace(kv, groups=tuple(copy(group) for group in kv.groups))
