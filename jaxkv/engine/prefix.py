"""Which pages hold which tokens: full pages by the hash of everything up to their end, so that they are found again."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, KeysView, Sequence
from dataclasses import dataclass, field

PageKey = tuple[bytes, bytes]
"""What a full page is found by: its key, and its tokens (int32) to compare."""


@dataclass(slots=True)
class PageChain:
    """The keys of a growing sequence's full pages: each is SHA-256 over the key before it and the page's tokens.

    `root` stands for all else that the content depends on (`root_key`). Cost: one hash per page, made once.
    """

    root: bytes
    keys: list[bytes] = field(default_factory=list)
    packed: list[bytes] = field(default_factory=list)

    def copy(self) -> PageChain:
        """Of a sequence that may go on otherwise."""
        return PageChain(self.root, list(self.keys), list(self.packed))

    def page(self, index: int, tokens: Sequence[int], page_size: int) -> PageKey:
        """The key of page `index`, which the first (index + 1) * page_size of `tokens` fill."""
        if index >= len(self.keys):
            self._extend(index + 1, tokens, page_size)
        return self.keys[index], self.packed[index]

    def pages(self, first: int, end: int, tokens: Sequence[int], page_size: int) -> Iterable[PageKey]:
        """The same of several."""
        self._extend(end, tokens, page_size)
        return zip(self.keys[first:end], self.packed[first:end], strict=True)

    def _extend(self, end: int, tokens: Sequence[int], page_size: int) -> None:
        first = len(self.keys)
        new = array("i", tokens[first * page_size : end * page_size]).tobytes()
        key, page_bytes = self.keys[-1] if self.keys else self.root, page_size * array("i").itemsize
        for start in range(0, len(new), page_bytes):
            packed = new[start : start + page_bytes]
            key = hashlib.sha256(key + packed).digest()
            self.keys.append(key)
            self.packed.append(packed)


def root_key(secret: bytes, *parts: str) -> bytes:
    """What chains of one model, codec and salt begin with. Without `secret` nobody can aim at another's key."""
    lengths = ",".join(str(len(part)) for part in parts)
    return hashlib.sha256(b"\0".join([secret, lengths.encode(), *(part.encode() for part in parts)])).digest()


class PrefixIndex:
    """Pages by key. The allocator decides what leaves it, and keeps every entry's parent as long as the entry."""

    def __init__(self) -> None:
        # Of bytes and numbers only: with an object for every page, be it a tuple, Python's garbage collector takes
        # milliseconds.
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._parent_of: dict[int, int | None] = {}
        self._tokens_of: dict[int, bytes] = {}

    @property
    def listed(self) -> KeysView[int]:
        """The pages that have an entry."""
        return self._key_of.keys()

    def find(self, page_key: PageKey, parent: int | None) -> int | None:
        """The page of this key if it does hold these tokens after that parent: a collision is a miss."""
        key, tokens = page_key
        page = self._page_of.get(key)
        if page is None or self._parent_of[page] != parent or self._tokens_of[page] != tokens:
            return None
        return page

    def add(self, page_key: PageKey, page: int, parent: int | None) -> bool:
        """Whether the page is listed now; it is not where its key is taken already."""
        key, tokens = page_key
        if key in self._page_of:
            return False
        self._page_of[key] = page
        self._key_of[page], self._tokens_of[page], self._parent_of[page] = key, tokens, parent
        return True

    def remove(self, page: int) -> None:
        del self._page_of[self._key_of.pop(page)], self._parent_of[page], self._tokens_of[page]

    def clear(self) -> None:
        for each in (self._page_of, self._key_of, self._parent_of, self._tokens_of):
            each.clear()

    def check(self) -> None:
        """Raises RuntimeError if the directions disagree, or an entry outlived its parent."""
        listed = {page: key for key, page in self._page_of.items()}
        if self._key_of != listed or not listed.keys() == self._parent_of.keys() == self._tokens_of.keys():
            raise RuntimeError("prefix index: pages and keys disagree")
        lost = [page for page, parent in self._parent_of.items() if parent is not None and parent not in listed]
        if lost:
            raise RuntimeError(f"prefix index: pages {lost[:5]} are listed, their parents are not")
