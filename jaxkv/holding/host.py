"""Keeps pages that have left the device in host memory, under the keys that they were listed by."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from itertools import takewhile

import numpy as np

from jaxkv.errors import CapacityError
from jaxkv.holding.hold import Hold

HostPage = tuple[tuple[np.ndarray, ...], ...]
"""Holds what each array of each store has of a page, [L, ...]."""


class HostPages:
    """Keeps at most `most` pages, those used last. Host only; a page is never changed."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.num_found = 0
        """Counts the tokens that requests took from here."""
        self._pages: OrderedDict[bytes, HostPage] = OrderedDict()

    def __len__(self) -> int:
        return len(self._pages)

    def __contains__(self, key: bytes) -> bool:
        return key in self._pages

    def load(self, hold: Hold, tokens: array[int], most: int) -> list[tuple[int, HostPage]]:
        """Extends a hold by pages that are kept here and continue it with these tokens, up to the
        first `most`. Returns what is to be written to which page before it is read; nothing where
        there is no room, or a policy bounds the hold.
        """
        first, size = hold.next_page(most), hold.page_size
        if first is None or hold.retention is not None:
            return []
        keys = (hold.key(index, tokens)[0] for index in range(first, most // size))
        found = list(takewhile(self._pages.__contains__, keys))
        try:
            hold.extend(hold.num_stored + len(found) * size)
        except CapacityError:
            return []
        for key in reversed(found):  # so that the first pages of a sequence stay longest
            self._pages.move_to_end(key)
        hold.advance(len(found) * size)
        self.num_found += len(found) * size
        pages = hold.parts[0].pages[first:]
        return [(page, self._pages[key]) for page, key in zip(pages, found, strict=True)]

    def put(self, key: bytes, page: HostPage) -> None:
        """Keeps a page, in place of the one that was used least lately."""
        self._pages[key] = page
        self._pages.move_to_end(key)
        if len(self._pages) > self.most:
            self._pages.popitem(last=False)

    def clear(self) -> None:
        self._pages.clear()
