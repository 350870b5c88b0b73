"""Finds the pages of a request that the device has not (any more): in host memory, then on a
disk.
"""

from __future__ import annotations

from array import array
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import NamedTuple

from jaxkv.holding.allocator import ELSEWHERE, nowhere
from jaxkv.holding.costs import Costs
from jaxkv.holding.disk import DiskPages, Found
from jaxkv.holding.hold import Allocators, Hold
from jaxkv.holding.host import HostPage, HostPages

AHEAD_BYTES = 2**30
"""Most bytes that are read for requests behind the first one that waits."""
LONGEST_WAIT_S = 0.05
"""Longest time that nobody else is heard while pages are read and nothing runs."""


class _Read(NamedTuple):
    """Says what is on its way to a hold."""

    future: Future[Found]
    num_pages: int


class Tiers:
    """Keeps pages in host memory, which may have room for none, and on a disk, if there is one.

    A page is offered to the disk when it is listed, so that a process that is killed has lost
    nothing but what was on its way, and to both when it leaves the device.
    """

    def __init__(self, host: HostPages, disk: DiskPages | None) -> None:
        self.host, self.disk = host, disk
        self.costs = Costs()
        self._reads: dict[Hold, _Read | None] = {}
        """Pages that are read for those that wait; None where there are none."""

    def wants(self, key: bytes, *, is_leaving: bool) -> bool:
        """Tells whether `put` would keep the page."""
        by_host = is_leaving and self.host.wants(key)
        return by_host or (self.disk is not None and self.disk.wants(key))

    def left(self, key: bytes) -> None:
        """Notes that a page has left the device which nothing here wants."""
        if self.disk is not None:
            self.disk.left(key)

    def put(self, key: bytes, page: HostPage, *, is_leaving: bool) -> None:
        """Keeps a page, which has left the device if it is leaving."""
        if is_leaving:
            self.host.put(key, page)
        if self.disk is not None and self.disk.wants(key):
            self.disk.put(key, page)
        elif is_leaving:
            self.left(key)

    def settle(self) -> None:
        """Takes note of what was written meanwhile."""
        if self.disk is not None:
            self.disk.settle()

    def read_ahead(
        self,
        hold: Hold,
        tokens: array[int],
        most: int,
        allocators: Allocators,
        *,
        is_first: bool,
        is_busy: bool,
    ) -> None:
        """Begins to read what the disk alone has of the first `most` of these tokens, where that
        pays; once for a hold that waits, and so is empty. allocators: of the device's pages.
        `is_first`: of those that wait; others come later if much is read already. `is_busy`: others
        run.
        """
        if self.disk is None or hold in self._reads or hold.retention is not None:
            return
        num_coming = sum(read.num_pages for read in self._reads.values() if read is not None)
        if not is_first and num_coming * self.disk.page_bytes > AHEAD_BYTES:
            return
        disk, host = self.disk, self.host
        hold.begin(allocators)
        on_device, _ = hold.find_kept(tokens, most, nowhere)
        num_found, pairs = hold.find_kept(tokens, most, lambda key: key in disk or key in host)
        hold.release()
        found = [pair for own in pairs for pair in own]
        missing = [key for page, key in found if page == ELSEWHERE and key not in host]
        disk.used([key for _, key in found])
        num_tokens = (num_found - on_device) * allocators.page_size
        pays = missing and self.costs.pays(len(missing), num_tokens, is_busy=is_busy)
        self._reads[hold] = _Read(self.disk.read(missing), len(missing)) if pays else None

    def is_coming(self, hold: Hold) -> bool:
        """Tells whether pages for the hold are being read."""
        read = self._reads.get(hold)
        return read is not None and not read.future.done()

    def wait(self) -> None:
        """Waits until something is read, but not long."""
        reads = [read.future for read in self._reads.values() if read is not None]
        coming = [future for future in reads if not future.done()]
        wait(coming, LONGEST_WAIT_S, FIRST_COMPLETED)

    def load(self, hold: Hold, tokens: array[int], most: int) -> list[tuple[int, HostPage]]:
        """Extends a hold by pages that are kept here and continue it with these tokens, up to the
        first `most`. Returns what is to be written to which page before it is read; nothing where
        there is no room, or a policy bounds the hold.
        """
        from_disk, host = self._has_read(hold), self.host
        if hold.retention is not None:
            return []
        before = hold.num_stored
        taken = hold.take_kept(tokens, most, lambda key: key in from_disk or key in host)
        loads = []
        for page, key in taken:
            kept = host.get(key)
            loads.append((page, from_disk[key] if kept is None else kept))
        keys, num_tokens = [key for _, key in taken], hold.num_stored - before
        of_host = num_tokens * sum(key in host for key in keys) // max(1, len(keys))
        host.used(keys)
        host.num_found += of_host
        if self.disk is not None:
            self.disk.num_found += num_tokens - of_host
        return loads

    def _has_read(self, hold: Hold) -> dict[bytes, HostPage]:
        """Returns what was read for the hold, which waits no more."""
        read = self._reads.pop(hold, None)
        if read is None or self.disk is None:
            return {}
        found = read.future.result()
        self.costs.read.add(found.num_read, found.seconds)
        self.disk.has_read(found)
        return found.pages

    def forget(self, hold: Hold) -> None:
        """Drops what is read for a hold that does not wait for it any more."""
        self._reads.pop(hold, None)

    def clear(self) -> None:
        """Drops all pages, those on the disk too."""
        self._reads.clear()
        self.host.clear()
        if self.disk is not None:
            self.disk.clear()

    def start_again(self) -> None:
        """Makes bookkeeping anew, whatever state an interrupt has left it in."""
        self._reads.clear()
        if self.disk is not None:
            self.disk.start_again()

    def close(self) -> None:
        """Writes what waits for the disk, and lets others have its directory."""
        self._reads.clear()
        try:
            if self.disk is not None:
                self.disk.close()
        finally:
            self.disk = None

    def describe(self) -> str:
        """Says what is kept where, as `LLM.describe` has it."""
        said = ""
        if self.host.most:
            said += f"; host memory keeps {self.host.most} more"
        if self.disk is not None:
            disk = self.disk
            said += (
                f"; {disk.path} keeps up to {disk.most_bytes // disk.page_bytes}, and has "
                f"{len(disk)}" + ("" if disk.is_writing else ", but cannot be written any more")
            )
        return said
