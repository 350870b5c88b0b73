"""Programs that move whole pages and recurrent states between two steps, or measure pages."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp

from jaxkv.kv import state
from jaxkv.kv.policies import Measure
from jaxkv.kv.state import PagedKV


@partial(jax.jit, donate_argnames=("kv",))
def copy_pages(kv: PagedKV, source_C: jax.Array, target_C: jax.Array, n: jax.Array) -> PagedKV:
    """Makes the first n copies of pages, one after the other: a later one may write what an earlier
    one has read.

    Consumes `kv`. Pair by pair, since all at once reads and writes padding too (measured,
    docs/architecture.md).
    """

    def copy(i: jax.Array, kv: PagedKV) -> PagedKV:
        source_1, target_1 = (
            jax.lax.dynamic_slice_in_dim(page_C, i, 1) for page_C in (source_C, target_C)
        )
        return state.copy_pages(kv, source_1, target_1)

    return jax.lax.fori_loop(0, n, copy, kv)


@partial(jax.jit, donate_argnames=("kv",))
def demote_pages(kv: PagedKV, source_C: jax.Array, target_C: jax.Array, n: jax.Array) -> PagedKV:
    """Encodes the first n pages anew as pages of `low`, one after the other. Consumes `kv`."""
    return jax.lax.fori_loop(0, n, lambda i, kv: state.demote(kv, source_C[i], target_C[i]), kv)


@partial(jax.jit, static_argnames=("num_slots",), donate_argnames=("kv",))
def copy_states(
    kv: PagedKV, source_C: jax.Array, target_C: jax.Array, n: jax.Array, *, num_slots: int
) -> PagedKV:
    """Makes the first n copies of recurrent states, one after the other. Consumes `kv`."""

    def copy(i: jax.Array, kv: PagedKV) -> PagedKV:
        return state.copy_state(kv, source_C[i], target_C[i], num_slots=num_slots)

    return jax.lax.fori_loop(0, n, copy, kv)


@partial(jax.jit, static_argnames=("num_slots",))
def read_states(
    kv: PagedKV, slot: jax.Array, *, num_slots: int
) -> tuple[tuple[jax.Array, ...], ...]:
    """Returns what each array of the recurrent states has in this slot, [layers, ...]."""
    return jax.tree.map(lambda x: x[_rows(x, slot, num_slots)], kv.states)


@partial(jax.jit, static_argnames=("num_slots",), donate_argnames=("kv",))
def write_states(
    kv: PagedKV, slot: jax.Array, states: tuple[tuple[jax.Array, ...], ...], *, num_slots: int
) -> PagedKV:
    """Stores in a slot what `read_states` has read from one. Consumes `kv`."""
    written = jax.tree.map(
        lambda x, new: x.at[_rows(x, slot, num_slots)].set(new), kv.states, states
    )
    return replace(kv, states=written)


def _rows(array: jax.Array, slot: jax.Array, num_slots: int) -> jax.Array:
    return jnp.arange(array.shape[0] // num_slots, dtype=jnp.int32) * num_slots + slot


@partial(jax.jit, static_argnames=("measure",))
def measure_pages(kv: PagedKV, page_W: jax.Array, *, measure: Measure) -> jax.Array:
    """Runs `state.measure_pages` as a program."""
    return state.measure_pages(kv, page_W, measure=measure)


@jax.jit
def read_pages(kv: PagedKV, page_C: jax.Array) -> tuple[tuple[jax.Array, ...], ...]:
    """Returns what each array of each store has of these pages, [L, C, ...]."""

    def of(store: state.Store) -> tuple[jax.Array, ...]:
        row_LC = jnp.arange(store.num_layers)[:, None] * store.num_pages + page_C[None]
        row = row_LC.ravel()
        # Row by row: XLA:TPU would lay out some arrays anew for a gather.
        found = (
            jax.lax.map(partial(jax.lax.dynamic_index_in_dim, x, keepdims=False), row)
            for x in store.arrays
        )
        return tuple(x.reshape(*row_LC.shape, *x.shape[1:]) for x in found)

    return tuple(map(of, kv.stores))


@partial(jax.jit, static_argnames=("s",), donate_argnames=("kv",))
def write_pages(
    kv: PagedKV, page_C: jax.Array, arrays: tuple[jax.Array, ...], n: jax.Array, *, s: int
) -> PagedKV:
    """Stores in the first n of these pages of store s what each of its arrays has, [L, C, ...].
    Consumes `kv`.
    """
    store = kv.stores[s]

    def write(i: jax.Array, pools: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        layer, c = i // n, i % n
        row = layer * store.num_pages + page_C[c]
        ones = (jax.lax.dynamic_index_in_dim(x[layer], c, keepdims=False) for x in arrays)
        return tuple(
            jax.lax.dynamic_update_index_in_dim(pool, one, row, 0)
            for pool, one in zip(pools, ones, strict=True)
        )

    pools = jax.lax.fori_loop(0, store.num_layers * n, write, store.arrays)
    return replace(kv, stores=(*kv.stores[:s], store.with_arrays(*pools), *kv.stores[s + 1 :]))
