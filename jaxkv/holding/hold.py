"""Keeps what sequences hold of the KV state: the noun of scheduler, policies and beams."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, takewhile

import numpy as np

from jaxkv.config import EngineConfig
from jaxkv.errors import CapacityError
from jaxkv.holding.allocator import ELSEWHERE, KVHandle, PageAllocator, nowhere
from jaxkv.holding.prefix import PageChain, PageKey
from jaxkv.holding.retention import NEVER, Retention
from jaxkv.holding.snapshots import Snapshots

PAGES_AT_ONCE = 8
"""Pages of an output that are listed together: one at a time costs the host half as much again, all
at the end would be felt by the step that they fall on.
"""

Pairs = tuple[tuple[int, int], ...]
"""(source, target) pages."""

Measures = tuple[tuple["Kept", list[int]], ...]
"""Pages to measure, and what the result is for."""


class Allocators:
    """Owns the pages of all page tables, which take them from one free list, and the demoted
    ones.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.page_size = config.block_size
        snapshots = Snapshots(config.snapshot_slots)
        self.pages = PageAllocator(config.num_pages, config.block_size, snapshots)
        self.low = PageAllocator(config.num_low_pages, config.block_size)

    def extend(self, short: Sequence[tuple[Hold, int]]) -> None:
        """Reserves pages for as many tokens of each hold as stand beside it, counted from the
        sequence's beginning on. None may have room for a page more than that already.

        Raises: CapacityError, with nothing changed, if there are too few for all holds.
        """
        size, end = self.page_size, 0
        needed = [-((hold.room_len - length) // size) for hold, length in short]
        new = self.pages.take(sum(needed) * len(self.config.windows))
        for (hold, _), num_pages in zip(short, needed, strict=True):
            for part in hold.parts:
                start, end = end, end + num_pages
                part.pages += new[start:end]
            hold.room_len += num_pages * size

    def pin(self, keys: Sequence[bytes]) -> None:
        """Keeps cached pages of these keys, those of the first table, longer than others."""
        self.pages.pin(self._of_tables(keys))

    def unpin(self, keys: Sequence[bytes]) -> None:
        """Takes back one `pin` of these keys."""
        self.pages.unpin(self._of_tables(keys))

    def _of_tables(self, keys: Sequence[bytes]) -> list[bytes]:
        """Returns the keys of the pages of all tables, where these are those of the first."""
        numbers = range(1, len(self.config.windows))
        return [own for key in keys for own in (key, *(key + n.to_bytes() for n in numbers))]

    def check_pins(self, pinned: Iterable[Sequence[bytes]]) -> None:
        """Raises RuntimeError unless these are the keys that are pinned."""
        counts = Counter(key for keys in pinned for key in self._of_tables(keys))
        if counts != self.pages.pins:
            raise RuntimeError(f"{len(self.pages.pins)} keys are pinned, expected {len(counts)}")

    def check(self, holds: Sequence[Hold]) -> None:
        """Raises RuntimeError unless `holds`, all live ones, agree with themselves and account for
        every page.
        """
        for hold in holds:
            hold.check()
        self.pages.check(hold.handle(table) for hold in holds for table in range(len(hold.parts)))
        self.low.check(hold.kept.handle for hold in holds if hold.kept is not None)


@dataclass(slots=True, eq=False)
class Part:
    """Holds pages of one page table for one sequence.

    `number` is the table's. `num_gone` tokens are not in its pages any more. `first` has the
    positions of slot 0 of its first pages; those past them follow each other. `window`: how many
    tokens a query sees, itself included; 0: all. `linked`: see `PageAllocator`.
    """

    allocator: PageAllocator
    number: int = 0
    window: int = 0
    linked: bool = True
    pages: list[int] = field(default_factory=list)
    first: list[int] = field(default_factory=list)
    num_gone: int = 0

    @property
    def num_gone_pages(self) -> int:
        return self.num_gone // self.allocator.page_size

    def keys(self, keys: Iterable[PageKey]) -> Iterable[PageKey]:
        """Returns what its pages are found by, where those of the first table have these keys."""
        if not self.number:
            return keys
        own = self.number.to_bytes()
        return ((key + own, tokens) for key, tokens in keys)

    def num_unseen(self, num_stored: int) -> int:
        """Counts the first pages of a sequence, gone ones included, that no query sees which comes
        after so many tokens.
        """
        if not self.window:
            return 0
        return max(0, num_stored - self.window + 1) // self.allocator.page_size

    def firsts(self, num_pages: int) -> np.ndarray:
        """Returns the positions of slot 0 of so many pages, those to come included."""
        steps = np.arange(len(self.first), num_pages)
        follow = self.num_gone + steps * self.allocator.page_size
        return np.concatenate([np.array(self.first, np.int64), follow])


@dataclass(slots=True, eq=False)
class Kept:
    """Holds what a policy has demoted of a sequence, and what it will decide by.

    low, low_first: demoted pages and their positions. mass, low_mass: softmax weights that the
    pages and the demoted pages got, as wide as the page tables of a row. measured: what the
    policy's `measure` says of its first pages, where it was asked since the last decision.
    """

    allocator: PageAllocator
    mass: np.ndarray
    low_mass: np.ndarray
    low: list[int] = field(default_factory=list)
    low_first: list[int] = field(default_factory=list)
    measured: np.ndarray | None = None

    @classmethod
    def nothing(cls, allocators: Allocators) -> Kept:
        """Returns what is kept of a sequence before its policy is first asked: nothing."""
        config = allocators.config
        return cls(allocators.low, np.zeros(config.table_width), np.zeros(config.low_row_pages))

    @property
    def handle(self) -> KVHandle:
        """Returns the demoted pages, all of them full."""
        return KVHandle(tuple(self.low), len(self.low) * self.allocator.page_size)

    def fork(self) -> Kept:
        """Returns a second one, which shares the demoted pages."""
        self.allocator.fork(self.handle)
        return replace(
            self,
            mass=self.mass.copy(),
            low_mass=self.low_mass.copy(),
            low=list(self.low),
            low_first=list(self.low_first),
        )


@dataclass(slots=True, eq=False)
class Hold:
    """Holds one sequence in every page table: which pages, how many tokens, under which keys.

    It is empty until `begin` and after `release`. Attributes ending in `_len` are numbers of tokens
    from the sequence's beginning on, the same for all tables:
    `num_stored` are in the KV state, counting what steps store that are under way;
    `room_len` have a place in the pages, or had one in pages that have gone;
    `bound_len` of these the row tables know (0: whoever changes earlier pages sets it back);
    `publish_len` is when pages are listed next (0: at once), after the first `num_published`, and
    `evict_len` when the policy of its `retention` is asked next.

    `chain` names its full pages for the prefix index. `is_listed` is False where no more of them
    are to be listed. `kept` is there while it holds anything under a retention.

    Of a model with recurrent states: `goals` are the lengths at which steps are to end, so that the
    state is kept beside the page that ends there, and `source` is the slot whose state it goes on
    from, until that is copied.
    """

    chain: PageChain
    prompt_len: int
    retention: Retention | None = None
    parts: tuple[Part, ...] = ()
    num_stored: int = 0
    room_len: int = 0
    bound_len: int = 0
    num_published: int = 0
    publish_len: int = 0
    is_listed: bool = True
    kept: Kept | None = None
    evict_len: int = NEVER
    goals: tuple[int, ...] = ()
    source: int | None = None

    @property
    def page_size(self) -> int:
        return self.parts[0].allocator.page_size

    @property
    def is_whole(self) -> bool:
        """Tells whether no token has gone that a later query could have seen."""
        return self.retention is None or not any(part.num_gone for part in self.parts)

    @property
    def is_due(self) -> bool:
        """Tells whether it has come to where its policy is asked."""
        return self.num_stored >= self.evict_len

    @property
    def has_states(self) -> bool:
        """Tells whether it goes on from snapshots of recurrent states only."""
        return self.parts[0].allocator.snapshots.num_slots > 0

    @property
    def stop_len(self) -> int:
        """Returns with how many tokens the next step has to end at the latest."""
        return min(self.evict_len, self.goals[0]) if self.goals else self.evict_len

    @property
    def is_empty(self) -> bool:
        return not (self.parts or self.num_stored or self.room_len or self.bound_len or self.kept)

    def handle(self, table: int = 0) -> KVHandle:
        """Returns its pages of a table and how many of its tokens they have."""
        if not self.parts:
            return KVHandle()
        part = self.parts[table]
        return KVHandle(tuple(part.pages), self.num_stored - part.num_gone)

    def begin(self, allocators: Allocators) -> None:
        """Makes it ready to take pages from these."""
        # Under a policy of its own it says which pages stay.
        self.parts = tuple(
            Part(allocators.pages, number, window if self.retention is None else 0, not window)
            for number, window in enumerate(allocators.config.windows)
        )
        if self.retention is not None:
            self.kept, self.evict_len = Kept.nothing(allocators), self.retention.limit
        self.goals = allocators.pages.snapshots.goals(self.prompt_len, allocators.page_size)
        self._set_published(0)

    def release(self) -> None:
        """Gives everything back. The keys of its pages stay: it may begin again."""
        for part in self.parts:
            part.allocator.release(self.handle(part.number), linked=part.linked)
        if self.kept is not None:
            self.kept.allocator.release(self.kept.handle)
        self._empty()

    def start_again(self) -> None:
        """Makes it empty, whatever state it was left in; its allocators are no more."""
        self.chain.clear()
        self._empty()

    def _empty(self) -> None:
        self.parts, self.kept, self.evict_len = (), None, NEVER
        self.num_stored = self.room_len = self.bound_len = 0
        self.num_published, self.publish_len, self.is_listed = 0, 0, True
        self.goals, self.source = (), None

    def fork(self) -> Hold:
        """Returns a second hold on the same tokens, which shares all of their pages, a partly
        filled last one too.

        Whoever writes next takes a page of its own for that one first (`own_tail`).
        """
        handles = [part.allocator.fork(self.handle(part.number)) for part in self.parts]
        parts = [
            replace(part, pages=list(handle.pages), first=list(part.first))
            for part, handle in zip(self.parts, handles, strict=True)
        ]
        pages_len = len(parts[0].pages) * self.page_size if parts else 0
        return replace(
            self,
            chain=self.chain.copy(),
            parts=tuple(parts),
            kept=None if self.kept is None else self.kept.fork(),
            room_len=parts[0].num_gone + pages_len if parts else 0,
            bound_len=0,
        )

    def extend_seen(self, length: int) -> None:
        """Reserves pages for the first `length` tokens, which fill them, but for those that no
        query sees which comes after them.

        Raises: CapacityError, with nothing changed, if there are too few.
        """
        size, allocator = self.page_size, self.parts[0].allocator
        firsts = [max(self.room_len // size, part.num_unseen(length)) for part in self.parts]
        new = iter(allocator.take(sum(length // size - first for first in firsts)))
        for part, first in zip(self.parts, firsts, strict=True):
            if first * size > self.room_len:  # nothing of what it held is seen any more
                allocator.release(KVHandle(tuple(part.pages)), linked=False)
                part.pages, part.num_gone = [], first * size
            part.pages += islice(new, length // size - first)
        self.room_len = length
        self.bound_len = 0

    def listed_before(self, part: Part, first: int, tokens: array[int]) -> list[int]:
        """Returns the listed pages of a table that come right before those it holds, at most those
        from page `first` on. Nobody holds them for that.
        """
        own = part.keys(self.chain.pages(first, part.num_gone_pages, tokens, self.page_size))
        found = list[int]()
        for key, _ in reversed(list(own)):
            page = part.allocator.listed([key])
            if not page:
                break
            found += page
        return found[::-1]

    def own_tail(self) -> Pairs:
        """Makes the last page ready for the next write; returns the page copies to make before,
        at most one of each part.

        A partly filled page that others hold too gives way to a new one; the last holder keeps it.
        Raises: CapacityError, with nothing changed, if no page is free.
        """
        copies, allocator = [], self.parts[0].allocator
        shared = [part for part in self.parts if allocator.tail_is_shared(self.handle(part.number))]
        if len(shared) > allocator.num_free:
            raise CapacityError("no page is free for a copy of a shared one")
        for part in shared:
            handle, copy = allocator.own_tail(self.handle(part.number))
            if copy is not None:
                part.pages, self.bound_len = list(handle.pages), 0
                copies.append(copy)
        return tuple(copies)

    def advance(self, count: int) -> None:
        """Counts so many more tokens as stored, in reserved pages."""
        if not 0 <= count <= self.room_len - self.num_stored:
            free = self.room_len - self.num_stored
            raise ValueError(f"expected 0 to {free} more tokens, got {count}")
        self.num_stored += count

    def trim(self, gone: Collection[int]) -> None:
        """Gives back the full pages of these indices; those past them move up.

        Others that share the pages keep them, and they stay in the prefix cache. What comes later
        is computed without them, and so is listed no more.
        """
        size = self.page_size
        for part in self.parts:
            num_full = (self.num_stored - part.num_gone) // size
            firsts = part.firsts(num_full).tolist()
            lost = KVHandle(tuple(part.pages[i] for i in sorted(gone)))
            part.allocator.release(lost, linked=part.linked)
            part.first = [first for i, first in enumerate(firsts) if i not in gone]
            part.pages = [page for i, page in enumerate(part.pages) if i not in gone]
            part.num_gone += len(gone) * size
        if self.retention is not None:
            self.evict_len = self.parts[0].num_gone + self.retention.limit
        self.bound_len = 0
        self._set_published(self.num_published)

    def drop_unseen(self) -> None:
        """Gives back pages that no later query sees."""
        for part in self.parts:
            count = part.num_unseen(self.num_stored) - part.num_gone_pages
            if count > 0:
                part.allocator.release(KVHandle(tuple(part.pages[:count])), linked=False)
                del part.pages[:count]
                part.num_gone += count * self.page_size
                self.bound_len = 0

    @property
    def unlisted_unseen(self) -> bool:
        """Tells whether pages are about to go that should be listed before."""
        return any(part.num_unseen(self.num_stored) > self.num_published for part in self.parts)

    def take_cached(self, tokens: array[int], most: int) -> int:
        """Takes listed pages that continue what it holds with these tokens, up to the first `most`;
        returns how many tokens they have.

        Nothing is taken where pages are reserved already.
        """
        if self.room_len != self.num_stored:
            return 0
        if (first := self.next_page(most)) is None:
            return 0
        end = min(most, self._most_cached) // self.page_size
        num_found, found = self._find_cached(first, end, tokens)
        if self.has_states:
            num_found, found = self._with_state(first, num_found, found, tokens)
        if num_found:
            for part, pages in zip(self.parts, found, strict=True):
                part.allocator.share(pages)
            self._take_over(first, num_found, found)
        return num_found * self.page_size

    def find_kept(
        self, tokens: array[int], most: int, is_kept: Callable[[bytes], bool]
    ) -> tuple[int, list[list[tuple[int, bytes]]]]:
        """Finds what continues what it holds with these tokens, up to the first `most`, where pages
        are kept elsewhere too. Returns how many pages of tokens, and the pages of each table with
        their keys.
        """
        if (first := self.next_page(most)) is None:
            return 0, [[] for _ in self.parts]
        end = min(most, self._most_cached) // self.page_size
        num_found, found = self._find_cached(first, end, tokens, is_kept)
        end, pairs = first + num_found, []
        for part, pages in zip(self.parts, found, strict=True):
            keys = part.keys(self.chain.pages(end - len(pages), end, tokens, self.page_size))
            pairs.append([(page, key) for page, (key, _) in zip(pages, keys, strict=True)])
        return num_found, pairs

    def take_kept(
        self, tokens: array[int], most: int, is_kept: Callable[[bytes], bool]
    ) -> list[tuple[int, bytes]]:
        """Takes what `find_kept` finds. Returns new pages, and the keys of what is to be written to
        them before anything reads them; takes nothing where there is no room for that.
        """
        num_found, pairs = self.find_kept(tokens, most, is_kept)
        allocator, first = self.parts[0].allocator, self.num_stored // self.page_size
        listed = [page for own in pairs for page, _ in own if page != ELSEWHERE]
        allocator.share(listed)  # before others are evicted
        try:
            new = iter(allocator.take(sum(map(len, pairs)) - len(listed)))
        except CapacityError:
            allocator.release(KVHandle(tuple(listed)))
            return []
        found, loads = [list[int]() for _ in pairs], list[tuple[int, bytes]]()
        for pages, own in zip(found, pairs, strict=True):
            for page, key in own:
                pages.append(next(new) if page == ELSEWHERE else page)
                if page == ELSEWHERE:
                    loads.append((pages[-1], key))
        if num_found:
            self._take_over(first, num_found, found)
        if loads:
            self._set_published(first)
        return loads

    def _with_state(
        self, first: int, num_found: int, found: list[list[int]], tokens: array[int]
    ) -> tuple[int, list[list[int]]]:
        """Leaves of what was found as much as ends where a snapshot of the state is. Has one made
        where the pages end: other sequences begin with them too.
        """
        snapshots, goal = self.parts[0].allocator.snapshots, (first + num_found) * self.page_size
        while num_found:
            behind = takewhile(lambda page: page not in snapshots, reversed(found[0]))
            if not (count := sum(1 for _ in behind)):
                self.source = snapshots.use(found[0][-1])
                break
            num_found, found = self._find_cached(first, first + num_found - count, tokens)
        length = (first + num_found) * self.page_size
        goals = {*self.goals} if first else {*self.goals, goal}
        self.goals = tuple(sorted(one for one in goals if one > length))
        return num_found, found

    def keep_state(self) -> int | None:
        """Returns the slot to which its state is to be copied now, if there is one: where a goal is
        reached whose page is listed.
        """
        if not self.goals or self.goals[0] > self.num_stored:
            return None
        reached, self.goals = self.goals[0], self.goals[1:]
        part, index = self.parts[0], reached // self.page_size - 1
        page = part.pages[index - part.num_gone_pages]
        snapshots = part.allocator.snapshots
        if reached != self.num_stored or page in snapshots or not part.allocator.is_listed(page):
            return None
        return snapshots.take(page)

    def _find_cached(
        self,
        first: int,
        end: int,
        tokens: array[int],
        is_kept: Callable[[bytes], bool] = nowhere,
    ) -> tuple[int, list[list[int]]]:
        """Finds the largest n for which each table's pages from `first` on, n at most and none past
        `end`, are listed or kept elsewhere, but for those that no query sees which comes after
        them. Returns n and the pages of each table.
        """
        found = [list[int]() for _ in self.parts]
        for part in self.parts:
            if part.linked:
                keys = (self.key(index, tokens) for index in range(first, end))
                last = part.pages[-1] if part.pages else None
                found[part.number] = part.allocator.find(part.keys(keys), last, is_kept)
                end = first + len(found[part.number])
        unlinked = [part for part in self.parts if not part.linked]
        while unlinked:
            before = end
            for part in unlinked:
                own = list(part.keys(self.chain.pages(first, end, tokens, self.page_size)))
                ends = range(first + 1, end + 1)
                unseen = [part.num_unseen(count * self.page_size) for count in ends]
                needed = [count - max(first, n) for count, n in zip(ends, unseen, strict=True)]
                num_found, found[part.number] = part.allocator.find_last(own, needed, is_kept)
                end = first + num_found
            if end == before:  # every table has what that end needs
                break
        for part in self.parts:
            if part.linked:
                del found[part.number][end - first :]
        return end - first, found

    def _take_over(self, first: int, num_found: int, found: list[list[int]]) -> None:
        """Goes on by pages that are its own already, those that `_find_cached` has found."""
        self.num_stored = self.room_len = (first + num_found) * self.page_size
        for part, pages in zip(self.parts, found, strict=True):
            if len(pages) < num_found:  # nothing of what it held is seen any more
                part.allocator.release(KVHandle(tuple(part.pages)), linked=False)
                part.pages, part.num_gone = [], self.num_stored - len(pages) * self.page_size
            part.pages += pages
        self._set_published(first + num_found)
        if any(part.window for part in self.parts):
            self.bound_len = 0
            self.drop_unseen()

    @property
    def _most_cached(self) -> int:
        """Counts the first tokens, which may come out of the prefix cache."""
        return NEVER if self.retention is None else self.retention.cached_len

    def next_page(self, most: int) -> int | None:
        """Returns which page could be a cached one next where the first `most` tokens may be; None
        if those that come next are less than a page.
        """
        index, rest = divmod(self.num_stored, self.page_size)
        end = self.num_stored + self.page_size
        return index if not rest and end <= min(most, self._most_cached) else None

    def key(self, index: int, tokens: array[int]) -> PageKey:
        """Returns what page `index` of these tokens, which it holds or is to hold, is found by."""
        return self.chain.page(index, tokens, self.page_size)

    def publish(self, tokens: array[int], num_known: int) -> None:
        """Lists the full pages of its first `num_known` tokens for others to find.

        Where the same tokens are listed already, it goes over to those pages.
        """
        first, end = self.num_published, num_known // self.page_size
        if first >= end or not self.is_listed or not self.is_whole:
            return
        self._set_published(min(self._publish(part, first, end, tokens) for part in self.parts))

    def _publish(self, part: Part, first: int, end: int, tokens: array[int]) -> int:
        """Lists pages `first` to `end` - 1 of a table, as far as they are there; returns up to
        which it has.
        """
        first = max(first, part.num_gone_pages)
        before = self.handle(part.number)
        keys = part.keys(self.chain.pages(first, end, tokens, self.page_size))
        handle, num_listed = part.allocator.publish(
            before, first - part.num_gone_pages, keys, linked=part.linked
        )
        if handle is not before:
            part.pages, self.bound_len = list(handle.pages), 0
        return first + num_listed

    def _set_published(self, num_pages: int) -> None:
        self.num_published, self.publish_len = num_pages, self._publish_len(num_pages)

    def _publish_len(self, num_published: int) -> int:
        """Returns with how many tokens there are pages to list: those of a prompt at once, those of
        an output together, none once some have gone: what comes later is computed without them.
        """
        if not self.is_whole:
            return NEVER
        if num_published < self.prompt_len // self.page_size:
            return 0
        return (num_published + PAGES_AT_ONCE) * self.page_size + 1

    def check(self) -> None:
        """Raises RuntimeError unless its figures agree with each other."""
        size = self.page_size
        for part in self.parts:
            if part.num_gone + len(part.pages) * size != self.room_len:
                raise RuntimeError(
                    f"{len(part.pages)} pages and {part.num_gone} tokens that have gone, expected "
                    f"{self.room_len} tokens in all"
                )
            if len(part.first) > len(part.pages):
                raise RuntimeError(f"{len(part.first)} positions of {len(part.pages)} pages")
        if self.bound_len > self.room_len or self.bound_len % size:
            raise RuntimeError(f"the row tables know {self.bound_len} of {self.room_len} tokens")
        if self.publish_len != self._publish_len(self.num_published):
            raise RuntimeError("it would list its pages too late or too early")
        if self.goals and (self.goals[0] < self.num_stored or self.goals[0] % size):
            raise RuntimeError(
                f"with {self.num_stored} tokens it is to keep states of {self.goals}"
            )
        if (self.kept is None) != (self.retention is None):
            raise RuntimeError("what it kept and its retention: expected both or none")
        if self.retention is not None:
            expected = self.parts[0].num_gone + self.retention.limit
            if not self.num_stored <= self.evict_len == expected:
                raise RuntimeError(
                    f"with {self.num_stored} tokens its policy is asked at {self.evict_len}, "
                    f"expected {expected}"
                )
