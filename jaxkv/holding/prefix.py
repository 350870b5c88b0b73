"""Finds which pages hold which tokens: full pages by the hash of everything up to their end, so
that they are found again.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from hashlib import sha256

from jaxkv.holding.snapshots import Snapshots

PageKey = tuple[bytes, bytes]
"""What a full page is found by: its key, and its tokens (int32) to compare."""


@dataclass(slots=True)
class PageChain:
    """Makes the keys of a growing sequence's full pages: each is SHA-256 over the key before it and
    the page's tokens.

    `root` stands for all else that the content depends on (`root_key`), made of `parts` with
    `secret` if that may change. Cost: one hash per page, made once.
    """

    root: bytes
    keys: list[bytes] = field(default_factory=list)
    packed: list[bytes] = field(default_factory=list)
    secret: bytes = b""
    parts: tuple[str, ...] = ()

    @classmethod
    def begun(cls, secret: bytes, *parts: str) -> PageChain:
        """Makes an empty chain of which all else has this root."""
        return cls(root_key(secret, *parts), secret=secret, parts=parts)

    def copy(self) -> PageChain:
        """Copies the chain for a sequence that may go on otherwise."""
        return replace(self, keys=list(self.keys), packed=list(self.packed))

    def renewed(self, secret: bytes) -> PageChain:
        """Returns the empty chain that is begun with another secret: what is listed under this
        one's keys is not found by it.
        """
        return PageChain.begun(secret, *self.parts)

    def page(self, index: int, tokens: array[int], page_size: int) -> PageKey:
        """Returns the key of page `index`, which the first (index + 1) * page_size of `tokens`
        fill.
        """
        if index >= len(self.keys):
            self._extend(index + 1, tokens, page_size)
        return self.keys[index], self.packed[index]

    def pages(self, first: int, end: int, tokens: array[int], page_size: int) -> Iterable[PageKey]:
        """Returns the keys of several pages, as `page` does of one."""
        self._extend(end, tokens, page_size)
        return zip(self.keys[first:end], self.packed[first:end], strict=True)

    def clear(self) -> None:
        """Forgets the keys, which are made anew when they are asked for."""
        del self.keys[:], self.packed[:]

    def _extend(self, end: int, tokens: array[int], page_size: int) -> None:
        key = self.keys[-1] if self.keys else self.root
        for start in range(len(self.keys) * page_size, end * page_size, page_size):
            packed = tokens[start : start + page_size].tobytes()
            key = sha256(key + packed).digest()
            self.keys.append(key)
            self.packed.append(packed)


def root_key(secret: bytes, *parts: str) -> bytes:
    """Makes what chains of one model, codec and salt begin with. Without `secret` nobody can aim at
    another's key.
    """
    lengths = ",".join(str(len(part)) for part in parts)
    return sha256(
        b"\0".join([secret, lengths.encode(), *(part.encode() for part in parts)])
    ).digest()


class PrefixIndex:
    """Finds pages by key. The allocator decides what leaves it, and keeps every entry's parent as
    long as the entry. `snapshots` of recurrent states leave with the pages that have them.
    """

    def __init__(self, num_pages: int, snapshots: Snapshots | None = None) -> None:
        self.snapshots = Snapshots() if snapshots is None else snapshots
        # Of bytes and numbers only: with an object for every page, be it a tuple, Python's garbage
        # collector takes milliseconds.
        self._page_of: dict[bytes, int] = {}
        self.key_of: list[bytes | None] = [None] * num_pages
        """By page; None of one that has no entry, whose parent and tokens mean nothing."""
        self._parent_of: list[int | None] = [None] * num_pages
        self._num_children = [0] * num_pages
        self._tokens_of = [b""] * num_pages

    def find(self, page_key: PageKey, parent: int | None) -> int | None:
        """Finds the page of this key if it does hold these tokens after that parent: a collision is
        a miss.
        """
        key, tokens = page_key
        page = self._page_of.get(key)
        if page is None or self._parent_of[page] != parent or self._tokens_of[page] != tokens:
            return None
        return page

    def page_of(self, key: bytes) -> int | None:
        """Returns the page that is listed under this key."""
        return self._page_of.get(key)

    def entries(self) -> Iterable[tuple[bytes, int, int | None, bytes]]:
        """Returns (key, page, parent, tokens) of all that is listed."""
        for key, page in self._page_of.items():
            yield key, page, self._parent_of[page], self._tokens_of[page]

    def add(self, page_key: PageKey, page: int, parent: int | None) -> bool:
        """Lists a page and tells whether it is listed now; it is not where its key is taken
        already.
        """
        key, tokens = page_key
        if key in self._page_of:
            return False
        self._page_of[key] = page
        self.key_of[page], self._tokens_of[page], self._parent_of[page] = key, tokens, parent
        if parent is not None:
            self._num_children[parent] += 1
        return True

    def remove(self, pages: Iterable[int]) -> list[int]:
        """Takes pages out of the index. Returns those that leave with them, because they follow one
        of them: where somebody holds a page without those before it.
        """
        lost: list[int] = []
        for page in pages:
            if self.key_of[page] is None:
                if page not in lost:
                    raise RuntimeError(f"page {page} is not listed")
                lost.remove(page)
                continue
            self._unlist(page)
            if self._num_children[page]:
                lost += self._orphans(page)
        return lost

    def _unlist(self, page: int) -> None:
        key, parent = self.key_of[page], self._parent_of[page]
        if key is not None:
            del self._page_of[key]
        self.key_of[page] = None
        self.snapshots.drop(page)
        if parent is not None:
            self._num_children[parent] -= 1

    def _orphans(self, page: int) -> list[int]:
        """Finds what follows the page, which is listed no more. Rare, so searched for."""
        found = [page]
        for parent in found:
            if self._num_children[parent]:
                children = [
                    child for child in self._page_of.values() if self._parent_of[child] == parent
                ]
                for child in children:
                    self._unlist(child)
                found += children
        return found[1:]

    def clear(self) -> None:
        self._page_of.clear()
        for of_page in (self.key_of, self._parent_of):
            of_page[:] = [None] * len(of_page)
        self._num_children[:] = [0] * len(self._num_children)
        self.snapshots.clear()

    def check(self) -> None:
        """Raises RuntimeError if the directions disagree, or an entry outlived its parent."""
        listed = {page: key for page, key in enumerate(self.key_of) if key is not None}
        if listed != {page: key for key, page in self._page_of.items()} or len(listed) != len(
            self._page_of
        ):
            raise RuntimeError("prefix index: pages and keys disagree")
        parents = ((page, self._parent_of[page]) for page in listed)
        lost = [page for page, parent in parents if parent is not None and parent not in listed]
        if lost:
            raise RuntimeError(f"prefix index: pages {lost[:5]} are listed, their parents are not")
        children = Counter(self._parent_of[page] for page in listed)
        if any(count != children[page] for page, count in enumerate(self._num_children)):
            raise RuntimeError("prefix index: the children of a page were not counted right")
        self.snapshots.check(listed)
