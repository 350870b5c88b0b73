"""Who owns which page: reference counts on the host, and immutable handles for what a sequence holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from jaxkv.errors import CapacityError


@dataclass(frozen=True, slots=True)
class KVHandle:
    """A sequence's hold on the KV state: page ids in order, and how many tokens of them are its own.

    A handle owns one reference on each of its pages. The allocator's operations consume the handle that they are given
    and return its successor; only `fork` leaves it alive.
    """

    pages: tuple[int, ...] = ()
    length: int = 0


class PageAllocator:
    """Hands out pages 0..num_pages-1. Mutable, host only; `check` states its invariants."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._references = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_pages - len(self._free)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that `num_tokens` tokens take."""
        return -(-num_tokens // self.page_size)

    def reserve(self, handle: KVHandle, num_tokens: int) -> KVHandle:
        """Extends the handle's pages to room for `num_tokens` tokens in all; its length stays.

        Raises: CapacityError, with nothing changed, if fewer pages are free than needed.
        """
        needed = self.pages_for(num_tokens) - len(handle.pages)
        if needed <= 0:
            return handle
        if needed > len(self._free):
            raise CapacityError(f"{needed} pages of {self.page_size} tokens needed, {len(self._free)} free")
        new = tuple(self._free.pop() for _ in range(needed))
        for page in new:
            self._references[page] = 1
        return KVHandle(handle.pages + new, handle.length)

    def advance(self, handle: KVHandle, length: int) -> KVHandle:
        """The handle after the device stored its tokens up to `length` in reserved pages."""
        if not handle.length <= length <= len(handle.pages) * self.page_size:
            room = len(handle.pages) * self.page_size
            raise ValueError(f"expected a length of {handle.length} to {room} tokens, got {length}")
        return KVHandle(handle.pages, length)

    def rewind(self, handle: KVHandle, length: int) -> KVHandle:
        """The handle cut to its first `length` tokens; pages past them are released.

        A page that is now partly filled may still be shared with a fork: fork the result before writing to it.
        """
        if not 0 <= length <= handle.length:
            raise ValueError(f"expected a length of 0 to {handle.length} tokens, got {length}")
        kept = self.pages_for(length)
        self._drop(handle.pages[kept:])
        return KVHandle(handle.pages[:kept], length)

    def fork(self, handle: KVHandle) -> tuple[KVHandle, tuple[int, int] | None]:
        """A second handle on the same tokens, and the (source, target) page copy that it needs before its next write.

        Full pages are shared. A partly filled tail page is copied, because both will write to it: the caller does that
        with `copy_pages`. `handle` stays valid. Raises: CapacityError, with nothing changed, if no page is free.
        """
        full, tail = divmod(handle.length, self.page_size)
        shared = handle.pages[:full]
        copied = self.reserve(KVHandle(), self.page_size).pages if tail else ()
        for page in shared:
            self._references[page] += 1
        copy = (handle.pages[full], copied[0]) if tail else None
        return KVHandle(shared + copied, handle.length), copy

    def release(self, handle: KVHandle) -> None:
        """Gives the handle's references back; pages without any become free."""
        self._drop(handle.pages)

    def _drop(self, pages: tuple[int, ...]) -> None:
        # Last page first, so that a sequence's first pages are handed out again first.
        for page in reversed(pages):
            if self._references[page] < 1:
                raise RuntimeError(f"page {page} released more often than it was taken: a handle was used twice")
            self._references[page] -= 1
            if not self._references[page]:
                self._free.append(page)

    def check(self, handles: Iterable[KVHandle]) -> None:
        """Raises RuntimeError unless `handles`, all live ones, account for every reference and every used page."""
        held = Counter(page for handle in handles for page in handle.pages)
        counted = {page: n for page, n in enumerate(self._references) if n}
        if held != counted:
            wrong = {page: (held.get(page, 0), counted.get(page, 0)) for page in {*held, *counted}}
            wrong = {page: pair for page, pair in wrong.items() if pair[0] != pair[1]}
            raise RuntimeError(f"page: (references held by handles, references counted) = {wrong}")
        if len(set(self._free)) != len(self._free) or set(self._free) & set(counted):
            raise RuntimeError("a page is free twice, or free and used")
        if len(self._free) + len(counted) != self.num_pages:
            raise RuntimeError(f"{len(self._free)} free + {len(counted)} used pages, expected {self.num_pages} in all")
