"""Moves pages between the device and host memory, beside the steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import jax
import numpy as np

from jaxkv.holding.host import HostPage, HostPages
from jaxkv.kv.state import PagedKV
from jaxkv.programs.pages import read_pages, write_pages

PAGES_AT_ONCE = 16

Evicted = Sequence[tuple[int, bytes]]
"""(page, key) of pages that are about to be written anew."""

Loads = Sequence[tuple[int, HostPage]]
"""Pages to be written, and what."""


class HostMoves:
    """Copies pages out before a step writes over them, and back in before a step reads them.

    The device works in order, so nothing waits: what is copied out is on its way while the step
    runs, and is kept (`settle`) before anybody looks for it.
    """

    def __init__(self, pages: HostPages, kv: PagedKV) -> None:
        self._pages = pages
        self._coming: list[tuple[list[bytes], tuple[tuple[jax.Array, ...], ...]]] = []
        self._shapes = [
            [(store.num_layers, PAGES_AT_ONCE, *x.shape[1:]) for x in store.arrays]
            for store in kv.stores
        ]

    def out(self, kv: PagedKV, evicted: Evicted) -> None:
        """Begins to copy out those pages that are not kept already."""
        new = [(page, key) for page, key in evicted if key not in self._pages]
        for some in chunks(new):
            page_C = np.zeros(PAGES_AT_ONCE, np.int32)
            page_C[: len(some)] = [page for page, _ in some]
            found = read_pages(replace(kv, rows=()), page_C)
            for array in jax.tree.leaves(found):
                array.copy_to_host_async()
            self._coming.append(([key for _, key in some], found))

    def settle(self) -> None:
        """Keeps what was copied out. Waits for what is still on its way."""
        for keys, found in self._coming:
            whole = jax.tree.map(np.asarray, found)
            for c, key in enumerate(keys):
                page = tuple(tuple(x[:, c].copy() for x in arrays) for arrays in whole)
                self._pages.put(key, page)
        self._coming.clear()

    def back(self, kv: PagedKV, loads: Loads) -> PagedKV:
        """Returns the state with these pages written. Consumes `kv`."""
        for some in chunks(loads):
            page_C = np.zeros(PAGES_AT_ONCE, np.int32)
            page_C[: len(some)] = [page for page, _ in some]
            for s, shapes in enumerate(self._shapes):
                arrays = tuple(
                    np.zeros(shape, some[0][1][s][i].dtype) for i, shape in enumerate(shapes)
                )
                for c, (_, page) in enumerate(some):
                    for whole, one in zip(arrays, page[s], strict=True):
                        whole[:, c] = one
                kv = write_pages(replace(kv, rows=()), page_C, arrays, np.int32(len(some)), s=s)
        return kv


def chunks(items: Sequence) -> Iterator[Sequence]:
    """Yields the items, at most PAGES_AT_ONCE at a time."""
    for first in range(0, len(items), PAGES_AT_ONCE):
        yield items[first : first + PAGES_AT_ONCE]
