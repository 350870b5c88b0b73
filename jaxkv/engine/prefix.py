"""Which pages hold which tokens: full pages by the hash of everything up to their end, so that they are found again."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class PageChain:
    """The keys of a growing sequence's full pages: each is SHA-256 over the key before it and the page's tokens.

    `root` stands for all else that the content depends on (`root_key`). Cost: one hash per page, made once.
    """

    root: bytes
    keys: list[bytes] = field(default_factory=list)

    def key(self, index: int, tokens: Sequence[int], page_size: int) -> bytes:
        """The key of page `index`, which the first (index + 1) * page_size of `tokens` fill."""
        while len(self.keys) <= index:
            before = self.keys[-1] if self.keys else self.root
            self.keys.append(hashlib.sha256(before + page_tokens(tokens, len(self.keys), page_size)).digest())
        return self.keys[index]


def root_key(secret: bytes, *parts: str) -> bytes:
    """What chains of one model, codec and salt begin with. Without `secret` nobody can aim at another's key."""
    lengths = ",".join(str(len(part)) for part in parts)
    return hashlib.sha256(b"\0".join([secret, lengths.encode(), *(part.encode() for part in parts)])).digest()


def page_tokens(tokens: Sequence[int], index: int, page_size: int) -> bytes:
    """The tokens of one page, as they are hashed and compared."""
    return array("i", tokens[index * page_size : (index + 1) * page_size]).tobytes()


@dataclass(frozen=True, slots=True)
class _Entry:
    page: int
    parent: int | None
    tokens: bytes


class PrefixIndex:
    """Pages by key. The allocator decides what leaves it, and keeps every entry's parent as long as the entry."""

    def __init__(self) -> None:
        self._entry_of: dict[bytes, _Entry] = {}
        self._key_of: dict[int, bytes] = {}

    def __contains__(self, page: int) -> bool:
        return page in self._key_of

    def find(self, key: bytes, parent: int | None, tokens: bytes) -> int | None:
        """The page of this key if it does hold these tokens after that parent: a collision is a miss."""
        entry = self._entry_of.get(key)
        return entry.page if entry is not None and (entry.parent, entry.tokens) == (parent, tokens) else None

    def add(self, key: bytes, page: int, parent: int | None, tokens: bytes) -> bool:
        """Whether the page is listed now; it is not where its key is taken already."""
        if key in self._entry_of:
            return False
        self._entry_of[key] = _Entry(page, parent, tokens)
        self._key_of[page] = key
        return True

    def remove(self, page: int) -> None:
        del self._entry_of[self._key_of.pop(page)]

    def clear(self) -> None:
        self._entry_of.clear()
        self._key_of.clear()

    def check(self) -> None:
        """Raises RuntimeError if the two directions disagree, or an entry outlived its parent."""
        if self._key_of != {entry.page: key for key, entry in self._entry_of.items()}:
            raise RuntimeError("prefix index: pages and keys disagree")
        lost = [entry.page for entry in self._entry_of.values() if entry.parent not in self._key_of | {None: b""}]
        if lost:
            raise RuntimeError(f"prefix index: pages {lost[:5]} are listed, their parents are not")
