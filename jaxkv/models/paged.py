"""Runs the attention of each layer over the pages of its KV group, inside one loop over layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.kv.state import PagedKV, PageTables, Statistics, Store
from jaxkv.models import depth, latent
from jaxkv.models.spec import ModelSpec
from jaxkv.ops.attention import (
    AnyIndex,
    Attention,
    Batch,
    Distances,
    Heads,
    LatentMaps,
    Place,
    Terms,
)

EVERYTHING = 2**30
"""The window of layers that see all tokens, and the chunk of those that cut nothing, where others
have one.
"""

Pools = tuple[jax.Array, jax.Array | None, jax.Array | None]
"""Pages, scales and extremes of a store."""

Result = tuple[jax.Array, "Held"]


class Held(NamedTuple):
    """Holds what layers change: the pools of each store, what is observed, and recurrent states.
    All else of the KV state stays outside of the loop. aside_TD: what experts have given that joins
    the stream behind the next layer (`ModelSpec.has_shortcut`). before: what layers of latent
    attention leave to those behind them. view_TX: what routers do (`models.routing`).
    kept_STD: what was kept of the stream (`models.passes`). given: what layers have given.
    aux_STD: the streams that have come into the `aux_layers` of `decoder.forward`.
    """

    stores: tuple[Pools, ...]
    statistics: Statistics | None
    states: tuple[tuple[jax.Array, ...], ...] = ()
    aside_TD: jax.Array | None = None
    before: latent.Before = latent.Before()
    view_TX: jax.Array | None = None
    kept_STD: jax.Array | None = None
    given: depth.Given | None = None
    aux_STD: jax.Array | None = None


class PagedAttention:
    """Knows where each layer keeps its keys and values in one step (`kv.rows` as before it).

    KV groups that share a store differ in data only: a layer picks its tables, and what the backend
    has prepared, the window included, by the number of its group. Where stores are unlike it
    branches; the stores of other groups pass through untouched, without a copy.
    """

    def __init__(
        self, attention: Attention, kv: PagedKV, batch: Batch, spec: ModelSpec, num_devices: int
    ) -> None:
        self._attention, self._kv, self._batch = attention, kv, batch
        self._cap = spec.attention.cap
        layers = range(spec.num_layers)
        # A layer without keys and values asks for none.
        places = [spec.group_of(x) if spec.has_attention(x) else (0, 0) for x in layers]
        if len(kv.stores) == len(kv.rows) == 1:  # every layer has a part of every page
            own = spec.kv_layers
            places = [
                (group, own.index(spec.source_of(layer)) if spec.has_attention(layer) else 0)
                for layer, (group, _) in enumerate(places)
            ]
        self._places_L2 = np.array(places, np.int32)
        heads_G = heads_of(spec, num_devices=num_devices)
        if len(kv.stores) == 1:
            heads_G = _comparable(heads_G)
        stores_G = kv.stores * (len(heads_G) // len(kv.stores))
        rows_G = kv.rows * (len(heads_G) // len(kv.rows))
        self._of_groups = [
            (_grown(rows, batch), attention.prepare(store, rows, batch, heads))
            for store, rows, heads in zip(stores_G, rows_G, heads_G, strict=True)
        ]
        # Else the number of a layer is that of its keys and values.
        self._has_places = len(heads_G) > 1 or spec.kv_layers != tuple(layers)
        if len(kv.stores) == 1 and len(heads_G) > 1:
            self._stacked = jax.tree.map(lambda *of_groups: jnp.stack(of_groups), *self._of_groups)

    def held(self, statistics: Statistics | None) -> Held:
        """Returns what the first layer begins with."""
        return Held(tuple(map(_pools, self._kv.stores)), statistics, self._kv.states)

    def state(self, held: Held) -> PagedKV:
        """Returns the KV state after the step, its lengths grown by the step's tokens."""
        rows = tuple(_grown(rows, self._batch) for rows in self._kv.rows)
        return PagedKV(tuple(map(_with, self._kv.stores, held.stores)), rows, held.states)

    def __call__(
        self,
        held: Held,
        number: jax.Array,
        q_TNH: jax.Array,
        *kv: jax.Array | None,
        groups: Sequence[int],
        scale: float,
        sinks_N: jax.Array | None,
        maps: LatentMaps | None,
        index: AnyIndex | None,
        distances: Distances | None,
        out_dtype: np.dtype,
    ) -> Result:
        """Attends the queries of layer `number` (int32) of the model, which is in one of `groups`.

        kv: keys and values [T, K, H], or None; the others as in `Terms`.
        Returns (out [T, N, H] of the values' H, what is held after it).
        """
        attend = partial(
            self._attend, Terms(scale, out_dtype, self._cap, sinks_N, maps, index, distances)
        )
        if not self._has_places:
            return attend(0, self._of_groups[0], held, number, q_TNH, *kv)
        group, layer = jnp.asarray(self._places_L2)[number]
        if len(self._kv.stores) == 1:
            own = self._of_groups[0]
            if len(self._of_groups) > 1:
                own = jax.tree.map(lambda of_groups: of_groups[group], self._stacked)
            return attend(0, own, held, layer, q_TNH, *kv)
        branches: list[Callable[..., Result]] = [
            partial(attend, g, self._of_groups[g]) for g in groups
        ]
        if len(branches) == 1:
            return branches[0](held, layer, q_TNH, *kv)
        # The numbers of the other groups lead nowhere.
        branch = jnp.asarray(np.searchsorted(groups, range(len(self._of_groups))), jnp.int32)[group]
        return jax.lax.switch(branch, branches, held, layer, q_TNH, *kv)

    def _attend(
        self,
        terms: Terms,
        s: int,
        own: tuple[PageTables, Any],
        held: Held,
        layer: jax.Array,
        q_TNH: jax.Array,
        *kv: jax.Array | None,
    ) -> Result:
        """Attends in layer `layer` of a KV group, whose pages are in store s, with the tables of
        that group and what is prepared for it.
        """
        tables, prepared = own
        place = Place(_with(self._kv.stores[s], held.stores[s]), layer, tables, held.statistics)
        size = place.store.layout.head_dim
        k_TKH, v_TKH = (None if x is None else _padded(x, size) for x in kv)
        found = self._attention.attend(
            q_TNH if terms.maps is not None else _padded(q_TNH, size),
            k_TKH,
            v_TKH,
            place,
            self._batch,
            prepared,
            terms,
        )
        stores = (*held.stores[:s], _pools(found.store), *held.stores[s + 1 :])
        out_TNH = found.out_TNH if terms.maps is not None else found.out_TNH[..., : q_TNH.shape[2]]
        return out_TNH, held._replace(stores=stores, statistics=found.statistics)


def heads_of(spec: ModelSpec, *, num_devices: int = 1) -> tuple[Heads, ...]:
    """Returns what attention has to do in each KV group, on each device that has some heads."""
    return tuple(
        Heads(
            num_heads=(group.num_heads or spec.num_heads) // num_devices,
            num_kv_heads=group.num_kv_heads // group.num_parts(num_devices),
            head_dim=group.head_dim,
            window=group.window,
            chunk=group.window if group.is_chunked else None,
            cap=spec.attention.cap,
            has_sinks=spec.attention.has_sinks,
            has_readers=bool(spec.attention.kv_sources),
            latent_dim=group.latent_dim,
            has_index=spec.attention.index is not None,
            has_index_key=group.has_index_key,
            has_entries=spec.attention.near > 0,
            has_distances=spec.attention.has_distances,
            has_unlike=any(one.num_heads is not None for one in spec.groups),
        )
        for group in spec.groups
    )


def _comparable(heads_G: tuple[Heads, ...]) -> tuple[Heads, ...]:
    """Returns heads that all have a window, or a chunk, if some have: then they differ in data."""
    if len({one.window for one in heads_G}) > 1:
        heads_G = tuple(replace(one, window=one.window or EVERYTHING) for one in heads_G)
    if len({one.chunk for one in heads_G}) > 1:
        heads_G = tuple(replace(one, chunk=one.chunk or EVERYTHING) for one in heads_G)
    return heads_G


def _padded(x: jax.Array, size: int) -> jax.Array:
    """Returns vectors with zeros behind them, as pages of a larger head size hold them."""
    missing = size - x.shape[-1]
    return jnp.pad(x, ((0, 0), (0, 0), (0, missing))) if missing else x


def _grown(rows: PageTables, batch: Batch) -> PageTables:
    return replace(rows, len_B=rows.len_B + batch.count_B)


def _pools(store: Store) -> Pools:
    return store.pages, store.scales, store.extremes


def _with(store: Store, pools: Pools) -> Store:
    pages, scales, extremes = pools
    return replace(store, pages=pages, scales=scales, extremes=extremes)
