"""Moves pages between the device and host memory, beside the steps. To and from a disk they go
through here too.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from jaxkv.engine.pages import chunks, moved_at_once, page_nbytes
from jaxkv.holding.directory import Directory
from jaxkv.holding.disk import DiskPages
from jaxkv.holding.host import HostPage, HostPages
from jaxkv.holding.tiers import Tiers
from jaxkv.kv.state import PagedKV
from jaxkv.programs.pages import read_pages, write_pages


def make_tiers(
    kv: PagedKV, *, host_bytes: int, disk_bytes: int, directory: Directory | None
) -> Tiers | None:
    """Returns what keeps pages of this state beside the device; None if nothing is to.

    Raises: ValueError where host memory or the disk has no room for a page.
    """
    page_bytes, _ = page_nbytes(kv)
    if 0 < host_bytes < page_bytes:
        raise ValueError(
            f"kv_host_bytes: expected room for a page, {page_bytes} bytes, got {host_bytes}"
        )
    host, disk = HostPages(host_bytes // page_bytes if host_bytes else 0), None
    if directory is not None:
        shapes = tuple(
            tuple(((store.num_layers, *x.shape[1:]), np.dtype(x.dtype)) for x in store.arrays)
            for store in kv.stores
        )
        disk = DiskPages(directory, disk_bytes, shapes)
    if not host.most and disk is None:
        return None
    return Tiers(host, disk)


class HostMoves:
    """Copies pages out before a step writes over them, and back in before a step reads them.

    The device works in order, so nothing waits: what is copied out is on its way while the step
    runs, and is kept (`settle`) before anybody looks for it. Only where there is much of it
    (`pages.IN_FLIGHT_BYTES`) the first of it has to arrive before there is more, either way.
    """

    def __init__(self, tiers: Tiers, kv: PagedKV) -> None:
        self._tiers = tiers
        self._coming: list[tuple[list[bytes], bool, tuple[tuple[Any, ...], ...]]] = []
        self._num_in_flight = self._num_loading = 0
        """Count those of the calls whose copies may still be on the device, and whose pages may
        still be on their way there.
        """
        self._at_once, self._most_in_flight = moved_at_once(kv)
        self._empty = [
            [((store.num_layers, self._at_once, *x.shape[1:]), x.dtype) for x in store.arrays]
            for store in kv.stores
        ]
        self._has_compiled = False

    def out(self, kv: PagedKV, pages: Sequence[tuple[int, bytes]], *, is_leaving: bool) -> None:
        """Begins to copy out those of these (page, key) that a tier wants. Others that leave are
        left out for good.
        """
        new = []
        for page, key in pages:
            if self._tiers.wants(key, is_leaving=is_leaving):
                new.append((page, key))
            elif is_leaving:
                self._tiers.left(key)
        keys = iter([key for _, key in new])
        for page_C, n in chunks([page for page, _ in new], self._at_once):
            if self._num_in_flight == self._most_in_flight:
                self._arrive()
            found = read_pages(replace(kv, rows=()), page_C)
            for array in jax.tree.leaves(found):
                array.copy_to_host_async()
            self._coming.append(([next(keys) for _ in range(n)], is_leaving, found))
            self._num_in_flight += 1

    def _arrive(self) -> None:
        """Waits for what is on its way to host memory, and leaves none of it on the device."""
        # A step that failed has left nothing to read: it is not asked for again.
        coming, self._coming = self._coming, []
        self._coming = [(*about, jax.tree.map(np.asarray, found)) for *about, found in coming]
        self._num_in_flight = 0

    def settle(self) -> None:
        """Keeps what was copied out. Waits for what is still on its way to host memory."""
        self._arrive()
        coming, self._coming = self._coming, []
        for keys, is_leaving, whole in coming:
            for c, key in enumerate(keys):
                page = tuple(tuple(x[:, c].copy() for x in arrays) for arrays in whole)
                self._tiers.put(key, page, is_leaving=is_leaving)
        self._tiers.settle()

    def forget(self) -> None:
        """Drops what is on its way."""
        self._coming.clear()
        self._num_in_flight = 0

    def back(self, kv: PagedKV, loads: Sequence[tuple[int, HostPage]]) -> PagedKV:
        """Returns the state with these pages written. Consumes `kv`."""
        if not loads:  # of a step, mostly: nothing that pages have cost
            return kv
        start = time.perf_counter()
        kept = iter([page for _, page in loads])
        for page_C, n in chunks([number for number, _ in loads], self._at_once):
            if self._num_loading == self._most_in_flight:
                jax.block_until_ready(kv.pools)
                self._num_loading = 0
            self._num_loading += 1
            some = [next(kept) for _ in range(n)]
            for s, of_store in enumerate(self._empty):
                arrays = tuple(np.zeros(*empty) for empty in of_store)
                for c, page in enumerate(some):
                    for whole, one in zip(arrays, page[s], strict=True):
                        whole[:, c] = one
                kv = write_pages(replace(kv, rows=()), page_C, arrays, np.int32(n), s=s)
        if self._has_compiled:  # the first time says nothing of the next ones
            self._tiers.costs.copied.add(len(loads), time.perf_counter() - start)
        self._has_compiled = True
        return kv
