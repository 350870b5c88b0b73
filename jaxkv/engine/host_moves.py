"""Moves pages between the device and host memory, beside the steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import jax
import numpy as np

from jaxkv.engine.pages import MOVED_AT_ONCE, chunks
from jaxkv.holding.host import HostPage, HostPages
from jaxkv.kv.state import PagedKV
from jaxkv.programs.pages import read_pages, write_pages


class HostMoves:
    """Copies pages out before a step writes over them, and back in before a step reads them.

    The device works in order, so nothing waits: what is copied out is on its way while the step
    runs, and is kept (`settle`) before anybody looks for it.
    """

    def __init__(self, pages: HostPages, kv: PagedKV) -> None:
        self._pages = pages
        self._coming: list[tuple[list[bytes], tuple[tuple[jax.Array, ...], ...]]] = []
        self._empty = [
            [((store.num_layers, MOVED_AT_ONCE, *x.shape[1:]), x.dtype) for x in store.arrays]
            for store in kv.stores
        ]

    def out(self, kv: PagedKV, evicted: Sequence[tuple[int, bytes]]) -> None:
        """Begins to copy out those of these (page, key) that are not kept already."""
        new = [(page, key) for page, key in evicted if key not in self._pages]
        keys = iter([key for _, key in new])
        for page_C, n in chunks([page for page, _ in new]):
            found = read_pages(replace(kv, rows=()), page_C)
            for array in jax.tree.leaves(found):
                array.copy_to_host_async()
            self._coming.append(([next(keys) for _ in range(n)], found))

    def settle(self) -> None:
        """Keeps what was copied out. Waits for what is still on its way."""
        # A step that failed has left nothing to read: it is not asked for again.
        coming, self._coming = self._coming, []
        for keys, found in coming:
            whole = jax.tree.map(np.asarray, found)
            for c, key in enumerate(keys):
                page = tuple(tuple(x[:, c].copy() for x in arrays) for arrays in whole)
                self._pages.put(key, page)

    def forget(self) -> None:
        """Drops what is on its way."""
        self._coming.clear()

    def back(self, kv: PagedKV, loads: Sequence[tuple[int, HostPage]]) -> PagedKV:
        """Returns the state with these pages written. Consumes `kv`."""
        kept = iter([page for _, page in loads])
        for page_C, n in chunks([number for number, _ in loads]):
            some = [next(kept) for _ in range(n)]
            for s, of_store in enumerate(self._empty):
                arrays = tuple(np.zeros(*empty) for empty in of_store)
                for c, page in enumerate(some):
                    for whole, one in zip(arrays, page[s], strict=True):
                        whole[:, c] = one
                kv = write_pages(replace(kv, rows=()), page_C, arrays, np.int32(n), s=s)
        return kv
