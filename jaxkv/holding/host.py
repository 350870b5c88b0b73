"""Keeps pages that have left the device in host memory, under the keys that they were listed by."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

HostPage = tuple[tuple[np.ndarray, ...], ...]
"""What each array of each store has of a page, [L, ...]."""


class HostPages:
    """Keeps at most `most` pages, those used last. Host only; a page is never changed."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.num_found = 0
        """Tokens that requests took from here."""
        self._pages: OrderedDict[bytes, HostPage] = OrderedDict()

    def __len__(self) -> int:
        return len(self._pages)

    def __contains__(self, key: bytes) -> bool:
        return key in self._pages

    def get(self, keys: Sequence[bytes]) -> list[HostPage]:
        """Returns the pages of these keys, which are there."""
        for key in reversed(keys):  # so that the first pages of a sequence stay longest
            self._pages.move_to_end(key)
        return [self._pages[key] for key in keys]

    def put(self, key: bytes, page: HostPage) -> None:
        """Keeps a page, in place of the one that was used least lately."""
        self._pages[key] = page
        self._pages.move_to_end(key)
        if len(self._pages) > self.most:
            self._pages.popitem(last=False)

    def clear(self) -> None:
        self._pages.clear()
