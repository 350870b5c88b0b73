"""Who owns which page: reference counts on the host, and immutable handles for what a sequence
holds.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from jaxkv.errors import CapacityError
from jaxkv.holding.prefix import PageKey, PrefixIndex
from jaxkv.holding.snapshots import Snapshots

ELSEWHERE = -1
"""Stands for the page of what is kept, but not on the device."""


def nowhere(key: bytes) -> bool:
    """Tells whether a page is kept elsewhere, where none are."""
    return False


@dataclass(frozen=True, slots=True)
class KVHandle:
    """Is a sequence's hold on the KV state: page ids in order, and how many tokens of them are its
    own.

    A handle owns one reference on each of its pages. The allocator's operations consume the handle
    that they are given and return its successor; only `fork` leaves it alive.
    """

    pages: tuple[int, ...] = ()
    length: int = 0


@dataclass(frozen=True, slots=True)
class ListedPage:
    """Holds a page of the prefix index, with the page before it and its tokens (int32)."""

    key: bytes
    page: int
    parent: int | None
    tokens: bytes
    num_holders: int


class PageAllocator:
    """Hands out pages 0..num_pages-1. Mutable, host only; `check` states its invariants.

    A page without references is empty, or cached: it keeps its tokens and its place in the prefix
    index until it is needed, the longest unused first, and those whose keys are pinned after all
    others. A handle gives back its last page first and holds every page before the one that it
    holds, so pages leave the index before their parents; where a policy has left gaps, with them at
    the latest.

    Pages are of the sequences' page tables, any of them; whose they are the keys say. Where a
    table is not `linked`, a sequence goes on without its first pages, so a page is listed and found
    whether or not the one before it is. Then a sequence's last pages stay cached longest.
    """

    def __init__(self, num_pages: int, page_size: int, snapshots: Snapshots | None = None) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._references = [0] * num_pages
        self._empty = list(range(num_pages - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._pinned: OrderedDict[int, None] = OrderedDict()
        """Cached pages, too, with keys that are in `pins`."""
        self.pins: dict[bytes, int] = {}
        """Counts how often each key is pinned, listed or not."""
        self.evicted: list[tuple[int, bytes]] | None = None
        """Pages that have lost their place in the index to be written anew, and their keys; None
        where nobody asks.
        """
        self.listed_now: list[tuple[int, bytes]] | None = None
        """Pages that have got a place in the index, and their keys; None where nobody asks."""
        self._index = PrefixIndex(num_pages, snapshots)
        self.snapshots = self._index.snapshots
        """Snapshots of the recurrent states after listed pages."""

    @property
    def num_free(self) -> int:
        """Counts the pages that nobody holds, cached ones included."""
        return len(self._empty) + len(self._cached) + len(self._pinned)

    @property
    def num_used(self) -> int:
        return self.num_pages - self.num_free

    @property
    def cached(self) -> tuple[int, ...]:
        """Returns the pages that nobody holds and the prefix index lists, those first that will be
        needed for others first.
        """
        return (*self._cached, *self._pinned)

    def listed_pages(self) -> list[ListedPage]:
        """Returns what the prefix index lists, as it is now."""
        return [
            ListedPage(key, page, parent, tokens, self._references[page])
            for key, page, parent, tokens in self._index.entries()
        ]

    def pages_for(self, num_tokens: int) -> int:
        """Counts the pages that `num_tokens` tokens take."""
        return -(-num_tokens // self.page_size)

    def take(self, num_pages: int) -> list[int]:
        """Takes so many free pages, for one handle or several.

        Raises: CapacityError, with nothing changed, if fewer are free.
        """
        empty, cached, pinned = self._empty, self._cached, self._pinned
        if num_pages > self.num_free:
            raise CapacityError(
                f"{num_pages} pages of {self.page_size} tokens needed, {self.num_free} free"
            )
        kept = max(0, len(empty) - num_pages)
        new = empty[kept:]
        new.reverse()
        del empty[kept:]
        evicted = [(cached or pinned).popitem(last=False)[0] for _ in range(num_pages - len(new))]
        if self.evicted is not None:
            self.evicted += [(page, key) for page in evicted if (key := self._index.key_of[page])]
        for page in self._index.remove(evicted):
            for free in (cached, pinned):
                if page in free:
                    del free[page]
                    empty.append(page)
        new += evicted
        for page in new:
            self._references[page] = 1
        return new

    def find(
        self,
        keys: Iterable[PageKey],
        parent: int | None,
        is_kept: Callable[[bytes], bool] = nowhere,
    ) -> list[int]:
        """Returns the pages of these keys, as far as they are listed, each after the one before it
        and the first after `parent`, or kept elsewhere. Nobody holds them for that: `share` does.
        """
        found = list[int]()
        for key in keys:
            page = self._find(key, parent, is_kept)
            if page is None:
                break
            found.append(page)
            parent = page
        return found

    def _find(
        self, key: PageKey, parent: int | None, is_kept: Callable[[bytes], bool]
    ) -> int | None:
        page = self._index.find(key, parent)
        return ELSEWHERE if page is None and is_kept(key[0]) else page

    def find_last(
        self, keys: Sequence[PageKey], needed: Sequence[int], is_kept: Callable[[bytes], bool]
    ) -> tuple[int, list[int]]:
        """Returns the largest n for which the last `needed[n - 1]` of the first n keys are listed
        or kept elsewhere, and those pages; (0, []) if there is none. For what is not `linked`;
        `needed` grows by at most one from key to key.
        """
        n, found = len(keys), list[int]()
        while n and len(found) < needed[n - 1]:
            page = self._find(keys[n - 1 - len(found)], None, is_kept)
            if page is not None:
                found.append(page)
            else:  # whatever ends behind it needs it too
                n, found = n - 1 - len(found), []
        return n, found[::-1]

    def is_listed(self, page: int) -> bool:
        return self._index.key_of[page] is not None

    def share(self, pages: Iterable[int]) -> None:
        """Adds a reference to each of these pages, which are listed or held."""
        for page in pages:
            self._cached.pop(page, None)
            self._pinned.pop(page, None)
            self._references[page] += 1

    def listed(self, keys: Iterable[bytes]) -> list[int]:
        """Returns the pages that are listed under these keys."""
        found = map(self._index.page_of, keys)
        return [page for page in found if page is not None]

    def pin(self, keys: Sequence[bytes]) -> None:
        """Keeps the pages of these keys, in order, longer than other cached ones, those too that
        are listed later.
        """
        for key in reversed(keys):
            self.pins[key] = self.pins.get(key, 0) + 1
            self._move(key, self._cached, self._pinned)

    def unpin(self, keys: Sequence[bytes]) -> None:
        """Takes back one `pin` of these keys."""
        for key in reversed(keys):
            self.pins[key] -= 1
            if not self.pins[key]:
                del self.pins[key]
                self._move(key, self._pinned, self._cached)

    def _move(
        self, key: bytes, source: OrderedDict[int, None], target: OrderedDict[int, None]
    ) -> None:
        page = self._index.page_of(key)
        if page is not None and page in source:
            del source[page]
            target[page] = None

    def publish(
        self, handle: KVHandle, first: int, keys: Iterable[PageKey], *, linked: bool = True
    ) -> tuple[KVHandle, int]:
        """Lists the handle's full pages from `first` on for others to find. Returns the handle and
        how many are listed.

        Where a page with the same tokens is listed already, the handle goes over to that one. It
        ends at a page whose key is taken by other tokens, and lists nothing if the page before the
        first is not listed (any more).
        """
        pages, num_listed = list(handle.pages), 0
        parent = pages[first - 1] if first and linked else None
        if parent is not None and self._index.key_of[parent] is None:
            return handle, 0
        add, goes_over = self._index.add, False
        for index, key in enumerate(keys, start=first):
            page = pages[index]
            if not add(key, page, parent):
                listed = self._index.find(key, parent)
                if listed is None:
                    break
                self.share((listed,))
                self._drop((page,))
                pages[index] = page = listed
                goes_over = True
            elif self.listed_now is not None:
                self.listed_now.append((page, key[0]))
            parent = page if linked else None
            num_listed += 1
        return KVHandle(tuple(pages), handle.length) if goes_over else handle, num_listed

    def forget(self) -> None:
        """Empties the prefix index: nothing computed so far is found again."""
        self._index.clear()
        for cached in (self._cached, self._pinned):
            self._empty += reversed(cached)
            cached.clear()

    def fork(self, handle: KVHandle) -> KVHandle:
        """Returns a second handle on the same tokens, which shares all of their pages, a partly
        filled last one too.

        Whoever writes next takes a page of its own for that one first (`own_tail`). `handle` stays
        valid.
        """
        pages = handle.pages[: self.pages_for(handle.length)]
        self.share(pages)
        return KVHandle(pages, handle.length)

    def own_tail(self, handle: KVHandle) -> tuple[KVHandle, tuple[int, int] | None]:
        """Returns the handle ready for its next write, and the (source, target) page copy that must
        come before.

        A partly filled last page that others hold too gives way to a new one; the last holder
        keeps it. Raises: CapacityError, with nothing changed, if no page is free.
        """
        if not self.tail_is_shared(handle):
            return handle, None
        index = handle.length // self.page_size
        source, (target,) = handle.pages[index], self.take(1)
        self._drop((source,))
        pages = (*handle.pages[:index], target, *handle.pages[index + 1 :])
        return KVHandle(pages, handle.length), (source, target)

    def tail_is_shared(self, handle: KVHandle) -> bool:
        """Tells whether a partly filled last page has other holders too."""
        index, rest = divmod(handle.length, self.page_size)
        return rest > 0 and self._references[handle.pages[index]] > 1

    def release(self, handle: KVHandle, *, linked: bool = True) -> None:
        """Gives the handle's references back; pages without any become free."""
        self._drop(handle.pages if linked else handle.pages[::-1])

    def _drop(self, pages: tuple[int, ...]) -> None:
        references, key_of, empty = self._references, self._index.key_of, self._empty
        # Last page first, so that a sequence's first pages stay cached longest.
        for page in reversed(pages):
            left = references[page] - 1
            if left < 0:
                raise RuntimeError(
                    f"page {page} released more often than it was taken: a handle was used twice"
                )
            references[page] = left
            if left:
                continue
            key = key_of[page]
            if key is None:
                empty.append(page)
            else:
                (self._pinned if key in self.pins else self._cached)[page] = None

    def check(self, handles: Iterable[KVHandle]) -> None:
        """Raises RuntimeError unless `handles`, all live ones, account for every reference and
        every used page.
        """
        handles = list(handles)
        for handle in handles:
            if not 0 <= handle.length <= len(handle.pages) * self.page_size:
                raise RuntimeError(
                    f"a handle of {handle.length} tokens has {len(handle.pages)} pages"
                )
        held = Counter(page for handle in handles for page in handle.pages)
        counted = {page: n for page, n in enumerate(self._references) if n}
        if held != counted:
            wrong = {page: (held.get(page, 0), counted.get(page, 0)) for page in {*held, *counted}}
            wrong = {page: pair for page, pair in wrong.items() if pair[0] != pair[1]}
            raise RuntimeError(f"page: (references held by handles, references counted) = {wrong}")
        free = [*self._empty, *self._cached, *self._pinned]
        if len(set(free)) != len(free) or set(free) & set(counted):
            raise RuntimeError("a page is free twice, or free and used")
        if len(free) + len(counted) != self.num_pages:
            raise RuntimeError(
                f"{len(free)} free + {len(counted)} used pages, expected {self.num_pages} in all"
            )
        for page in free:
            key = self._index.key_of[page]
            place = self._pinned if key in self.pins else self._cached
            if key is None and (page in self._cached or page in self._pinned):
                raise RuntimeError(f"page {page} is cached but not listed in the prefix index")
            if key is not None and page not in place:
                raise RuntimeError(f"page {page} is listed, and free in the wrong place")
        self._index.check()
