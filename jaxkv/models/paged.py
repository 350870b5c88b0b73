"""Runs the attention of each layer over the pages of its KV group, inside one loop over layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.kv.state import PagedKV, PageTables, Statistics, Store
from jaxkv.models.spec import ModelSpec
from jaxkv.ops.attention import Attention, Batch, Heads, Place

EVERYTHING = 2**30
"""The window of layers that see all tokens, where others have one."""

Pools = tuple[jax.Array, jax.Array | None, jax.Array | None]
"""Pages, scales and extremes of a store."""

Result = tuple[jax.Array, "Held"]


class Held(NamedTuple):
    """Holds what layers change: the pools of each store, and what is observed. All else of the KV
    state stays outside of the loop.
    """

    stores: tuple[Pools, ...]
    statistics: Statistics | None


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
        asked = spec.attention
        self._scale = spec.head_dim**-0.5 if asked.scale is None else asked.scale
        self._cap = asked.cap
        places = [spec.group_of(layer) for layer in range(spec.num_layers)]
        if len(kv.stores) == len(kv.rows) == 1:  # every layer has a part of every page
            places = [(group, layer) for layer, (group, _) in enumerate(places)]
        self._places_L2 = np.array(places, np.int32)
        heads_G = heads_of(spec, num_devices=num_devices)
        if len(kv.stores) == 1 and len({heads.window for heads in heads_G}) > 1:
            heads_G = tuple(replace(one, window=one.window or EVERYTHING) for one in heads_G)
        stores_G = kv.stores * (len(heads_G) // len(kv.stores))
        rows_G = kv.rows * (len(heads_G) // len(kv.rows))
        self._of_groups = [
            (_grown(rows, batch), attention.prepare(store, rows, batch, heads))
            for store, rows, heads in zip(stores_G, rows_G, heads_G, strict=True)
        ]
        if len(kv.stores) == 1 and len(heads_G) > 1:
            self._stacked = jax.tree.map(lambda *of_groups: jnp.stack(of_groups), *self._of_groups)

    def held(self, statistics: Statistics | None) -> Held:
        """Returns what the first layer begins with."""
        return Held(tuple(map(_pools, self._kv.stores)), statistics)

    def state(self, held: Held) -> PagedKV:
        """Returns the KV state after the step, its lengths grown by the step's tokens."""
        rows = tuple(_grown(rows, self._batch) for rows in self._kv.rows)
        return PagedKV(tuple(map(_with, self._kv.stores, held.stores)), rows)

    def __call__(
        self,
        held: Held,
        number: jax.Array,
        *qkv: jax.Array,
        sinks_N: jax.Array | None,
        out_dtype: np.dtype,
    ) -> Result:
        """Attends the queries of layer `number` (int32) of the model.

        qkv: q [T, N, H], k and v [T, K, H]. Returns (out [T, N, H], what is held after it).
        """
        attend = partial(self._attend, sinks_N=sinks_N, out_dtype=out_dtype)
        if len(self._of_groups) == 1:
            return attend(0, self._of_groups[0], held, number, *qkv)
        group, layer = jnp.asarray(self._places_L2)[number]
        if len(self._kv.stores) == 1:
            own = jax.tree.map(lambda of_groups: of_groups[group], self._stacked)
            return attend(0, own, held, layer, *qkv)
        branches: list[Callable[..., Result]] = [
            partial(attend, g, own) for g, own in enumerate(self._of_groups)
        ]
        return jax.lax.switch(group, branches, held, layer, *qkv)

    def _attend(
        self,
        s: int,
        own: tuple[PageTables, Any],
        held: Held,
        layer: jax.Array,
        *qkv: jax.Array,
        sinks_N: jax.Array | None,
        out_dtype: np.dtype,
    ) -> Result:
        """Attends in layer `layer` of a KV group, whose pages are in store s, with the tables of
        that group and what is prepared for it.
        """
        tables, prepared = own
        place = Place(_with(self._kv.stores[s], held.stores[s]), layer, tables, held.statistics)
        q_TNH, k_TKH, v_TKH = qkv
        found = self._attention.attend(
            q_TNH,
            k_TKH,
            v_TKH,
            place,
            self._batch,
            prepared,
            scale=self._scale,
            cap=self._cap,
            sinks_N=sinks_N,
            out_dtype=out_dtype,
        )
        stores = (*held.stores[:s], _pools(found.store), *held.stores[s + 1 :])
        return found.out_TNH, Held(stores, found.statistics)


def heads_of(spec: ModelSpec, *, num_devices: int = 1) -> tuple[Heads, ...]:
    """Returns what attention has to do in each KV group, on each device that has some heads."""
    return tuple(
        Heads(
            num_heads=spec.num_heads // num_devices,
            num_kv_heads=group.num_kv_heads // num_devices,
            head_dim=group.head_dim,
            window=group.window,
            cap=spec.attention.cap,
            has_sinks=spec.attention.has_sinks,
        )
        for group in spec.groups
    )


def _grown(rows: PageTables, batch: Batch) -> PageTables:
    return replace(rows, len_B=rows.len_B + batch.count_B)


def _pools(store: Store) -> Pools:
    return store.pages, store.scales, store.extremes


def _with(store: Store, pools: Pools) -> Store:
    pages, scales, extremes = pools
    return replace(store, pages=pages, scales=scales, extremes=extremes)
