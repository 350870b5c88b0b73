"""Which requests run next, and how many of their tokens: decode rows first, prefill chunks fill the
token budget.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from itertools import compress

from jaxkv.config import EngineConfig
from jaxkv.engine.plan import LoopPlan, Pairs, StepPlan
from jaxkv.engine.trim import Norms, Trim
from jaxkv.errors import CapacityError
from jaxkv.holding.allocator import KVHandle, PageAllocator
from jaxkv.holding.prefix import PageKey
from jaxkv.holding.retention import NEVER
from jaxkv.programs.buckets import fit_bucket, token_buckets
from jaxkv.requests.request import Request

STEP_COST = 64
"""What a step costs however few its tokens, counted in tokens: it reads all weights (measured on a
CPU).
"""

WATERMARK = 0.02
"""Part of the pool that admission leaves for running rows to grow into, beside one page for each of
them.
"""

PAGES_AT_ONCE = 8
"""Pages of an output that are listed together: one at a time costs the host half as much again, all
at the end would be felt by the step that they fall on.
"""


class Scheduler:
    """By priority, then first come first served. Mutable, host only; `check` states its invariants.

    Pages are taken as tokens come. Where they run out, the request that is last in that order gives
    all of its own back and waits again (it is preempted); its tokens are kept and computed anew.
    The first one in order never is, and fits alone, so something always advances.

    A beam without pending tokens waits for the others of its search. They are neighbours in that
    order and all fit
    together, so the first search in order always advances too: where nothing else is left to
    compute, its missing beams are admitted whatever it takes.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.allocator = PageAllocator(config.num_pages, config.block_size)
        self.trim = Trim(config)
        self.running: list[Request] = []
        self.num_preemptions = 0
        self.num_looked_up = 0
        self.num_found = 0
        self._waiting: list[tuple[tuple[int, int], Request]] = []
        self._num_added = 0
        self._free_rows = list(range(config.max_num_seqs - 1, -1, -1))
        self._copies: dict[Request, tuple[int, int]] = {}

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def waiting(self) -> list[Request]:
        """In the order in which they will be admitted."""
        return [request for _, request in sorted(self._waiting)]

    def add(self, request: Request) -> None:
        request.arrival = self._num_added
        self._num_added += 1
        heapq.heappush(self._waiting, (request.order, request))

    def plan(self, norms: Norms | None = None) -> StepPlan | LoopPlan | None:
        """The next thing to run with its pages reserved, or None if there is nothing to do.

        `norms` measures pages for the policies that want it.
        """
        for request in {
            **self._copies,
            **self.trim.undone,
        }:  # an interrupt came before: these pages hold nothing
            self._preempt(request)
        self._publish_and_let_go()
        if self.trim.rows:
            self._trim(norms)
        while True:
            self._admit()
            if not self.running:
                return None
            pending = [request.num_tokens - request.num_stored for request in self.running]
            most = max(pending)
            if not most:
                raise RuntimeError(
                    "every running request waits for a beam that is neither running nor waiting"
                )
            plan = (
                self._plan_step()
                if most > 1
                else self._plan_loop(list(compress(self.running, pending)))
            )
            # None where all that was ready gave its pages up and those before it are beams that
            # wait: they come next.
            if plan is not None:
                return plan

    def copied(self) -> None:
        """The demotions and copies of the last plan are made."""
        self._copies.clear()
        self.trim.done()

    def launched(self, plan: StepPlan | LoopPlan) -> list[tuple[Request, int]]:
        """Counts what the plan stores and samples as done from now on, before anybody has read it.

        Returns its requests, each with the number of tokens that come to it unless it ends before.
        """
        if isinstance(plan, LoopPlan):
            for request, count in plan.work:
                request.num_stored += count
                request.num_tokens += count
            return plan.work
        rows = []
        for request, count in plan.work:
            request.handle = self.allocator.advance(request.handle, request.handle.length + count)
            coming = int(request.num_pending == 0)
            request.num_tokens += coming
            rows.append((request, coming))
        return rows

    def remove(self, request: Request) -> None:
        """Takes a request out wherever it is and frees what it holds; full pages stay cached."""
        if request.row is not None:
            self._publish(request)
            self._release(request)
        elif (request.order, request) in self._waiting:
            self._waiting.remove((request.order, request))
            heapq.heapify(self._waiting)

    def _publish_and_let_go(self) -> None:
        """Lists new full pages, of prompts at once; frees the rows and pages of requests whose last
        tokens are coming.

        The device works in order: what takes their place is written after their last step.
        """
        due = [
            r for r in self.running if len(r.tokens) >= r.publish_len or r.num_tokens == r.max_len
        ]
        for request in due:
            self._publish(request)
            if request.num_tokens == request.max_len:
                self._release(request)

    def _release(self, request: Request) -> None:
        if request.row is None:
            raise RuntimeError(f"request {request.id} is not running")
        del self.running[bisect_left(self.running, request.order, key=_order)]
        self._free_rows.append(request.row)
        self._copies.pop(request, None)
        self.allocator.release(request.handle)
        self.trim.end(request)
        request.row, request.num_bound, request.handle, request.is_listed = (
            None,
            0,
            KVHandle(),
            True,
        )
        self._set_published(request, 0)

    def _admit(self) -> None:
        if self._waiting and not self._free_rows and not self._is_ready():
            self._preempt(self.running[-1])
        # In order: a request that does not fit yet holds back those behind it, or it could wait
        # forever.
        owed = self._owed_pages() if self._waiting and self._free_rows else 0
        while self._waiting and self._free_rows:
            _, request = self._waiting[0]
            if request.num_coming:
                return  # it was preempted, and all its tokens are computed anew
            found = self._take_cached(request)
            needed = self._pages_to_come(request)
            if self._is_ready() and needed > self.allocator.num_free - owed:
                self.allocator.release(request.handle)
                request.handle = KVHandle()
                self._set_published(request, 0)
                return
            heapq.heappop(self._waiting)
            request.row = self._free_rows.pop()
            self._set_published(request, request.num_published)
            self.trim.begin(request)
            if not request.num_preemptions:
                self.num_looked_up += request.prompt_len
            self._count_found(request, found)
            insort(self.running, request, key=_order)
            owed += needed + 1

    def _is_ready(self) -> bool:
        """Whether anything that runs has something to compute."""
        return any(request.num_pending for request in self.running)

    def _owed_pages(self) -> int:
        """What running requests still need for the tokens that they have, and are likely to need
        soon.
        """
        owed = sum(self._pages_to_come(request) for request in self.running)
        return owed + len(self.running) + int(WATERMARK * self.config.num_pages)

    def _pages_to_come(self, request: Request) -> int:
        num_held = request.num_tokens - request.num_gone
        if request.retention is not None:
            num_held = min(num_held, request.retention.limit)
        return max(0, self.allocator.pages_for(num_held) - len(request.pages))

    def _plan_loop(self, ready: list[Request]) -> LoopPlan | None:
        left = [request.max_len - request.num_tokens for request in ready]
        # With others waiting, stop as soon as the first row is done: its place goes to one of them.
        num_steps = min(self.config.decode_steps, min(left) if self._waiting else max(left))
        if True in [request.needs_host for request in ready]:
            num_steps = 1
        pairs = zip(ready, left, strict=True)
        wanted = [(request, num if num < num_steps else num_steps) for request, num in pairs]
        if self.trim.rows:
            wanted = [
                (request, min(num, request.evict_len - request.num_stored))
                for request, num in wanted
            ]
        work = self._reserve_all(wanted)
        return (
            LoopPlan(sorted(work, key=_length_of_work), num_steps, *self._before())
            if work
            else None
        )

    def _before(self) -> tuple[Pairs, Pairs]:
        """Copies and demotions that come before the next step."""
        return tuple(self._copies.values()), self.trim.demotions

    def _plan_step(self) -> StepPlan | None:
        decoding = [request for request in self.running if request.num_pending == 1]
        budget = self._step_tokens(len(decoding))
        work = [(request, 1) for request in decoding[:budget]]
        budget -= len(work)
        coming: set[PageKey] = set()
        for request in self.running:
            if request.num_pending > 1 and budget > 0 and self._is_next(request, coming):
                count = min(budget, request.num_ready)
                self._expect(request, count, coming)
                work.append((request, count))
                budget -= count
        work = self._reserve_all(sorted(work, key=_order_of_work))
        if not work:
            return None
        # A prompt's last token alone is a decode row too.
        decode = sorted((item for item in work if item[1] == 1), key=_length_of_work)
        return StepPlan(decode + [item for item in work if item[1] > 1], *self._before())

    def _step_tokens(self, num_decoding: int) -> int:
        """Most tokens of the next step: what is pending, or as many as fill the next smaller
        program exactly where two steps, the second one with what is left, cost less than one that
        is mostly padding.
        """
        wanted = min(
            self.config.max_num_batched_tokens, sum(request.num_ready for request in self.running)
        )
        buckets = token_buckets(self.config.max_num_batched_tokens)
        smaller = max((bucket for bucket in buckets if bucket < wanted), default=0)
        if smaller <= num_decoding:
            return wanted
        rest = fit_bucket(buckets, wanted - smaller + num_decoding)
        return smaller if smaller + rest + STEP_COST < fit_bucket(buckets, wanted) else wanted

    def _reserve_all(self, work: list[tuple[Request, int]]) -> list[tuple[Request, int]]:
        """Pages for so many more tokens of each request, which come in order. Returns what of the
        work is left: where no pages are free, the last running ones give theirs back, maybe some of
        these.
        """
        size, short, is_search = self.config.block_size, [], False
        for request, count in work:
            missing = request.num_stored - request.num_gone + count - len(request.pages) * size
            if missing > 0 or request.beams:
                short.append((request, missing))
                is_search = is_search or bool(request.beams)
        if not is_search and self._reserve_at_once(short):
            return work
        for request, missing in short:
            self._reserve(request, len(request.pages) * size + missing)
        return [item for item in work if item[0].row is not None]

    def _reserve_at_once(self, short: list[tuple[Request, int]]) -> bool:
        """Whether there are pages for so many tokens more of all of these."""
        needed = [self.allocator.pages_for(missing) for _, missing in short]
        try:
            new, end = self.allocator.take(sum(needed)), 0
        except CapacityError:
            return False
        for (request, _), num_pages in zip(short, needed, strict=True):
            start, end = end, end + num_pages
            request.pages += new[start:end]
        return True

    def _reserve(self, request: Request, num_tokens: int) -> None:
        while request.row is not None:
            try:
                if request.beams:  # only they share the page that they write to
                    request.handle, copy = self.allocator.own_tail(request.handle)
                    if copy is not None:
                        self._copies[request], request.num_bound = copy, 0
                request.handle = self.allocator.reserve(request.handle, num_tokens)
                return
            except CapacityError:
                self._preempt(self.running[-1])

    def _preempt(self, request: Request) -> None:
        self._publish(request)
        self._release(request)
        self.num_preemptions += 1
        request.num_preemptions += 1
        heapq.heappush(self._waiting, (request.order, request))

    def _trim(self, norms: Norms | None) -> None:
        """Asks the policies of requests whose budget is reached, in order, which pages stay."""
        for request in self.trim.due(self.running):
            self._publish(request)
            while self.trim.is_due(request):  # until it is done, or preempted
                try:
                    self.trim.ask(request, self.allocator, norms)
                except CapacityError:
                    self._preempt(self.running[-1])

    def forget(self) -> None:
        """Nothing computed so far is found again, nor what running requests list later of it."""
        self.allocator.forget()
        for request in self.running:
            request.is_listed = False

    def start_over(self) -> None:
        """Preempts every request and forgets what was cached: the pages' contents are lost."""
        for request in list(self.running):
            self._preempt(request)
        self.allocator.forget()

    # --- the prefix cache

    def _take_cached(self, request: Request) -> int:
        """Extends what the request holds by the cached pages that follow; returns their tokens.

        The last token is always computed: what comes after it is not in the cache.
        """
        if (first := self._next_page(request)) is None:
            return 0
        size = self.config.block_size
        # Page after page, up to the one that has the last token.
        end = min(len(request.tokens) - 1, request.most_cached) // size
        keys = (self._key(request, index) for index in range(first, end))
        request.handle, num_found = self.allocator.take_listed(request.handle, keys)
        if num_found:
            self._set_published(request, first + num_found)
        return num_found * size

    def _next_page(self, request: Request) -> int | None:
        """Which page of the request could be one that is cached; None if what comes next is less
        than a page.
        """
        index, rest = divmod(request.num_stored, self.config.block_size)
        end = request.num_stored + self.config.block_size
        whole = not rest and end < len(request.tokens) and end <= request.most_cached
        return index if whole and request.reads_cache else None

    def _publish(self, request: Request) -> None:
        """Lists the request's full pages for others."""
        size, first = self.config.block_size, request.num_published
        end = request.num_known // size
        if first < end and request.is_listed and not request.num_gone:
            keys = request.chain.pages(first, end, request.tokens, size)
            before = request.handle
            handle, num_listed = self.allocator.publish(before, first, keys)
            if handle is not before:  # it has gone over to pages of others
                request.handle, request.num_bound = handle, 0
            self._set_published(request, first + num_listed)

    def _set_published(self, request: Request, num_pages: int) -> None:
        request.num_published, request.publish_len = (
            num_pages,
            self._publish_len(request, num_pages),
        )

    def _publish_len(self, request: Request, num_published: int) -> int:
        """With how many tokens it has pages to list: those of a prompt at once, those of an output
        together, none once
        some have gone: what comes later is computed without them.
        """
        if request.num_gone:
            return NEVER
        size = self.config.block_size
        return (
            0
            if num_published < request.prompt_len // size
            else (num_published + PAGES_AT_ONCE) * size + 1
        )

    def _is_next(self, request: Request, coming: set[PageKey]) -> bool:
        """Whether to compute the request's next page now, and not take it over from another one
        after this step.
        """
        self._count_found(request, self._take_cached(request))
        index = self._next_page(request)
        return index is None or self._key(request, index) not in coming

    def _count_found(self, request: Request, num_tokens: int) -> None:
        # Not of a preempted request: its own pages would count as hits.
        if not request.num_preemptions:
            self.num_found += num_tokens
            request.num_cached += num_tokens

    def _expect(self, request: Request, count: int, coming: set[PageKey]) -> None:
        """Adds the pages that the next `count` tokens fill."""
        if request.num_gone:
            return
        size = self.config.block_size
        first, end = request.num_stored // size, (request.num_stored + count) // size
        coming.update(self._key(request, index) for index in range(first, end))

    def _key(self, request: Request, index: int) -> PageKey:
        return request.chain.page(index, request.tokens, self.config.block_size)

    def check(self) -> None:
        """Raises RuntimeError if pages, rows or order do not add up."""
        self.allocator.check(request.handle for request in self.running)
        self.trim.check(self.running)
        rows = [request.row for request in self.running] + self._free_rows
        if sorted(rows, key=str) != sorted(range(self.config.max_num_seqs), key=str):
            raise RuntimeError(
                f"rows owned or free: {rows}, expected each of {self.config.max_num_seqs} once"
            )
        if [request.order for request in self.running] != sorted(
            request.order for request in self.running
        ):
            raise RuntimeError("running requests are out of order")
        if any(
            one.publish_len != self._publish_len(one, one.num_published) for one in self.running
        ):
            raise RuntimeError("a running request would list its pages too late or too early")
        if any(
            r.row is not None or r.num_bound or r.pages or r.kept or r.num_gone
            for _, r in self._waiting
        ):
            raise RuntimeError("a waiting request holds a row or pages")


def _order(request: Request) -> tuple[int, int]:
    return request.order


def _order_of_work(item: tuple[Request, int]) -> tuple[int, int]:
    return item[0].order


def _length_of_work(item: tuple[Request, int]) -> int:
    """Decode rows are listed by length: attention sweeps neighbouring rows together, as far as the
    longest one goes.
    """
    return item[0].num_stored - item[0].num_gone
