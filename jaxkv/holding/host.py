"""Keeps pages that have left the device in host memory, under the keys that they were listed by."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

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

    def wants(self, key: bytes) -> bool:
        """Tells whether `put` would keep the page, which is not here yet."""
        return self.most > 0 and key not in self._pages

    def get(self, key: bytes) -> HostPage | None:
        return self._pages.get(key)

    def used(self, keys: Sequence[bytes]) -> None:
        """Notes the use of what is kept of a sequence, so that its first pages stay longest."""
        for key in reversed(keys):
            if key in self._pages:
                self._pages.move_to_end(key)

    def put(self, key: bytes, page: HostPage) -> None:
        """Keeps a page, in place of the one that was used least lately."""
        self._pages[key] = page
        self._pages.move_to_end(key)
        if len(self._pages) > self.most:
            self._pages.popitem(last=False)

    def clear(self) -> None:
        self._pages.clear()
