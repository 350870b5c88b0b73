"""Divides the tokens of each page over devices that have the same KV heads; with latent attention,
whose rows are of all heads, these are all devices.

A page of S tokens is on D devices: the first has its first S / D tokens, and so on. A device sees a
store of smaller pages. Queries of all heads that meet the page meet what each device has
(`Softmax.over`), and what they find is added up head by head; or all devices' latent rows come to
each device's heads. vLLM's decode context parallelism divides the same rows token by token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from jaxkv.axes import MeshAxes, axis_names, joined, num_axes
from jaxkv.kv.state import Store
from jaxkv.ops.attention.index import Choice


class Share(NamedTuple):
    """Says which tokens of each page a device has: from its token `begin` on as many as its store's
    pages have, of `page_size` on all devices together.
    """

    begin: int | jax.Array
    page_size: int

    def covering(
        self, low: jax.Array, high: jax.Array, store: Store
    ) -> tuple[jax.Array, jax.Array]:
        """Returns from which slot to which the store has those of the pages that have slots
        low..high-1 of all devices.
        """
        first, end = low // self.page_size, -(-high // self.page_size)
        return first * store.page_size, end * store.page_size


def on_one(
    function: Callable[..., Any], axis: MeshAxes | None, device: jax.Device | None = None
) -> Callable[..., Any]:
    """Returns a function as the only device of a mesh axis runs it: this one, or none, where it is
    traced alone. It has whole pages then.
    """
    if axis is None:
        return function
    names = axis_names(axis)
    sizes = (1,) * len(names)
    mesh: Any = AbstractMesh(sizes, names)
    if device is not None:
        mesh = Mesh(np.array(device).reshape(sizes), names)
    whole = PartitionSpec()
    return jax.shard_map(function, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)


def share_of(store: Store, axis: MeshAxes | None) -> Share:
    """Returns this device's part of the pages; all of them where no axis divides their tokens."""
    if axis is None:
        return Share(0, store.page_size)
    begin = jax.lax.axis_index(axis) * store.page_size
    return Share(begin, store.page_size * jax.lax.axis_size(axis))


def sharing(axis: MeshAxes | None, num_parts: int) -> MeshAxes | None:
    """Returns the last of the axes, along which devices have the same where the first divide
    something into so many parts; None where no two have.
    """
    names = axis_names(axis)
    return joined(names[num_axes(map(jax.lax.axis_size, names), num_parts) :])


def token_axes(store: Store, axis: MeshAxes | None) -> MeshAxes | None:
    """Returns those of the axes over which the tokens of a store's pages are divided: the last, of
    devices that have the same heads; None where a device has all of them.
    """
    names, num_parts = axis_names(axis), store.page_size // store.pages.shape[2]
    sizes = map(jax.lax.axis_size, names[::-1])
    return joined(names[len(names) - num_axes(sizes, num_parts) :])


def own_store(store: Store) -> Store:
    """Returns a store with the layout of this device's part of its pages."""
    return replace(store, layout=replace(store.layout, page_size=store.pages.shape[2]))


def own_destinations(dest_T: jax.Array, store: Store, axis: MeshAxes) -> jax.Array:
    """Returns where tokens go in this device's store, of where they go in whole pages: past the
    pool for those of other devices.
    """
    share = share_of(store, axis)
    slot_T = dest_T % share.page_size - share.begin
    is_own_T = (slot_T >= 0) & (slot_T < store.page_size)
    own_T = dest_T // share.page_size * store.page_size + slot_T
    return jnp.where(is_own_T, own_T, store.num_pages * store.page_size)


def of_all_heads(x: jax.Array, axis: MeshAxes | None, *, along: int) -> jax.Array:
    """Returns what the devices have of their heads, which lie along one axis of the array."""
    return x if axis is None else jax.lax.all_gather(x, axis, axis=along, tiled=True)


def sum_of_own_heads(x_TNH: jax.Array, axis: MeshAxes | None) -> jax.Array:
    """Adds up what the devices have found for this device's heads."""
    if axis is None:
        return x_TNH
    return jax.lax.psum_scatter(x_TNH, axis, scatter_dimension=1, tiled=True)


def choose_of_all(index: Choice, score: jax.Array, store: Store, axis: MeshAxes) -> jax.Array:
    """Returns which of this device's [.., C] are chosen among those of all devices, where the first
    of equal scores counts by position.
    """
    own = (*score.shape[:-1], -1, store.page_size // index.pool)  # page by page
    whole = jax.lax.all_gather(score.reshape(own), axis, axis=len(own) - 1, tiled=True)
    chosen = index.choose(whole.reshape(*score.shape[:-1], -1)).reshape(whole.shape)
    begin = jax.lax.axis_index(axis) * own[-1]
    mine = jax.lax.dynamic_slice_in_dim(chosen, begin, own[-1], axis=len(own) - 1)
    return mine.reshape(score.shape)
