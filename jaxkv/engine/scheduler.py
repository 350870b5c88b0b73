"""Decides which requests run next, and how many of their tokens: decode rows first, prefill chunks
fill the token budget.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterable
from contextlib import suppress
from itertools import compress

from jaxkv.config import EngineConfig
from jaxkv.engine.plan import LoopPlan, StepPlan
from jaxkv.errors import CapacityError
from jaxkv.holding.adapters import AdapterSlots
from jaxkv.holding.allocator import PageAllocator
from jaxkv.holding.eviction import Eviction
from jaxkv.holding.hold import Allocators, Measures, Pairs
from jaxkv.holding.host import HostPage
from jaxkv.holding.prefix import PageKey
from jaxkv.holding.tiers import Tiers
from jaxkv.programs.buckets import fit_bucket, token_buckets
from jaxkv.requests.request import Request

STEP_COST = 64
"""What a step costs however few its tokens, counted in tokens: it reads all weights (measured on a
CPU).
"""

READ_AHEAD = 8
"""Number of waiting requests, the first ones, whose pages are read from a disk ahead of time."""

PageAndKey = tuple[int, bytes]

WATERMARK = 0.02
"""Part of the pool that admission leaves for running rows to grow into, beside one page for each of
them.
"""


class Scheduler:
    """Schedules by priority, then first come first served. Mutable, host only; `check` states its
    invariants.

    Pages are taken as tokens come. Where they run out, the request that is last in that order gives
    all of its own back and waits again (it is preempted); its tokens are kept and computed anew.
    The first one in order never is, and fits alone, so something always advances.

    A beam without pending tokens waits for the others of its search. They are neighbours in that
    order and all fit together, so the first search in order always advances too: where nothing else
    is left to compute, its missing beams are admitted whatever it takes.
    """

    def __init__(self, config: EngineConfig, tiers: Tiers | None = None) -> None:
        self.config = config
        self.tiers = tiers
        self.adapters = AdapterSlots(config.num_adapters)
        self.loop_steps = config.decode_steps
        """Counts the steps of a decode loop at most."""
        self.num_preemptions = 0
        self.num_looked_up = 0
        self.num_found = 0
        self._num_added = 0
        self._begin()

    def _begin(self) -> None:
        """Makes all that there is of requests and pages, for none so far."""
        self.allocators = Allocators(self.config)
        self._note_moves()
        self.eviction = Eviction(self.allocators)
        self.running: list[Request] = []
        self.bounded: set[Request] = set()
        """Running requests that have a policy."""
        self.thinking: set[Request] = set()
        """Running requests that may reason for so many tokens only."""
        self.leaving: set[Request] = set()
        """Requests without a row whose last tokens are coming. They keep their pages until those
        are read, and listed with them, unless somebody else needs the pages.
        """
        self.waiting: list[Request] = []
        """Those that wait, in the order in which they will be admitted."""
        self._free_rows = list(range(self.config.max_num_seqs - 1, -1, -1))
        self._copies: dict[Request, Pairs] = {}
        self._state_copies: list[tuple[int, int]] = []
        self._loads: dict[Request, list[tuple[int, HostPage]]] = {}

    @property
    def allocator(self) -> PageAllocator:
        """Hands out the pages of all page tables."""
        return self.allocators.pages

    @property
    def needs_results(self) -> bool:
        """Tells whether a policy is asked next that decides by what the steps so far return."""
        due = (request.hold.retention for request in self.bounded if request.is_due)
        return any(one is not None and one.needs_results for one in due)

    def add(self, request: Request) -> None:
        request.arrival = self._num_added
        self._num_added += 1
        insort(self.waiting, request, key=_order)

    def plan(self) -> StepPlan | LoopPlan | None:
        """Plans the next thing to run with its pages reserved, or None if there is nothing to do.

        Where it `needs_results`, what steps have returned must have been read before.
        """
        self._publish_and_let_go()
        if self.bounded:
            self._trim()
        if self.config.has_windows:
            self._drop_unseen()
        if self.config.has_states:
            self._keep_states()
        while True:
            is_reading = self._admit()
            if not self.running:
                return None
            pending = [request.num_tokens - request.hold.num_stored for request in self.running]
            most = max(pending)
            if not most:
                if is_reading:
                    return None  # the beam that the others wait for is behind it
                raise RuntimeError(
                    "every running request waits for a beam that is neither running nor waiting"
                )
            plan = (
                self._plan_step()
                if most > 1 or self.config.pooled
                else self._plan_loop(list(compress(self.running, pending)))
            )
            # None where all that was ready gave its pages up and those before it are beams that
            # wait: they come next.
            if plan is not None:
                return plan

    def copied(self) -> None:
        """Notes that the demotions and copies of the last plan are made."""
        self._copies.clear()
        self._state_copies.clear()
        self.eviction.done()

    def copy_states(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Has recurrent states copied from slot to slot before the next step, after the copies that
        are to be made already.
        """
        self._state_copies += pairs

    def _keep_states(self) -> None:
        """Keeps the states of rows that have come to where others will go on from."""
        for request in self.running:
            slot = request.hold.keep_state()
            if slot is not None and request.row is not None:
                self._state_copies.append((request.row, slot))

    def launched(self, plan: StepPlan | LoopPlan) -> list[tuple[Request, int]]:
        """Counts what the plan stores and samples as done from now on, before anybody has read it.

        Returns its requests, each with the number of tokens that come to it unless it ends before.
        """
        if isinstance(plan, LoopPlan):
            for request, count in plan.work:
                request.hold.num_stored += count
                request.num_tokens += count
            return plan.work
        rows = []
        for request, count in plan.work:
            request.hold.advance(count)
            coming = int(request.num_pending == 0)
            request.num_tokens += coming
            rows.append((request, coming))
        return rows

    def remove(self, request: Request) -> None:
        """Takes a request out wherever it is and frees what it holds; full pages stay cached."""
        if request in self.leaving:
            self._publish(request)
            self._give_back(request)
        elif request.row is not None:
            self._publish(request)
            self._release(request)
        else:
            place = bisect_left(self.waiting, request.order, key=_order)
            if self.waiting[place : place + 1] == [request]:
                if self.tiers is not None:
                    self.tiers.forget(request.hold)
                del self.waiting[place]

    def _publish_and_let_go(self) -> None:
        """Lists new full pages, of prompts at once; frees the rows of requests whose last tokens
        are coming.

        The device works in order: what takes their place is written after their last step.
        """
        due = [
            r
            for r in self.running
            if len(r.tokens) >= r.hold.publish_len or r.num_tokens == r.max_len
        ]
        for request in due:
            self._publish(request)
            if request.num_tokens == request.max_len:
                self._leave_row(request)
                self.leaving.add(request)

    def _drop_unseen(self) -> None:
        """Gives back pages that are behind every window, after listing them."""
        for request in self.running:
            if request.hold.unlisted_unseen:
                self._publish(request)
            request.hold.drop_unseen()

    def _release(self, request: Request) -> None:
        self._leave_row(request)
        self._give_back(request)

    def _leave_row(self, request: Request) -> None:
        if request.row is None:
            raise RuntimeError(f"request {request.id} is not running")
        del self.running[bisect_left(self.running, request.order, key=_order)]
        self._free_rows.append(request.row)
        self.adapters.give_back(request.draw.adapter)
        self._copies.pop(request, None)
        self._loads.pop(request, None)
        self.bounded.discard(request)
        self.thinking.discard(request)
        self.eviction.forget(request.hold)
        request.row = None

    def _give_back(self, request: Request) -> None:
        self.leaving.discard(request)
        request.hold.release()

    def _make_room(self) -> None:
        """Frees pages: of all that are leaving, or else of the running request that is last."""
        if not self.leaving:
            self._preempt(self.running[-1])
        for request in sorted(self.leaving, key=_order):  # in all processes the same pages first
            self._give_back(request)

    def _admit(self) -> bool:
        """Gives rows to those that wait, as far as they fit; returns whether the next one waits for
        pages from a disk.
        """
        if self.tiers is not None and self.tiers.disk is not None:
            for n, request in enumerate(self.waiting[:READ_AHEAD]):
                self._read(request, is_first=not n)
        if self.waiting and not self._is_ready():
            # All that run are beams, which wait for others behind this request.
            adapter = self.waiting[0].draw.adapter
            while self.running and not (self._free_rows and self.adapters.has_room(adapter)):
                self._preempt(self.running[-1])
        # In order: a request that does not fit yet holds back those behind it, or it could wait
        # forever.
        if not self.waiting or not self._free_rows:
            return False
        owed = self._owed_pages()
        owed_low = sum(self._low_pages_to_come(request) for request in self.bounded)
        while self.waiting and self._free_rows:
            request = self.waiting[0]
            if request.num_coming:
                return False  # it was preempted, and all its tokens are computed anew
            if not self.adapters.has_room(request.draw.adapter):
                return False
            self._read(request, is_first=True)
            if self.is_loading:
                return True  # sooner than what it could compute until then
            request.hold.begin(self.allocators)
            found = self._take_cached(request)
            needed, low = self._pages_to_come(request), self._low_pages_to_come(request)
            is_short = not self._has_free(owed + needed, owed_low + low)
            if is_short and self.leaving:
                self._make_room()
                is_short = not self._has_free(owed + needed, owed_low + low)
            if is_short and self._is_ready():
                request.hold.release()
                return False
            del self.waiting[0]
            request.row = self._free_rows.pop()
            self.adapters.take(request.draw.adapter)
            if request.hold.retention is not None:
                self.bounded.add(request)
            if request.draw.thinking is not None:
                self.thinking.add(request)
            self._begin_state(request)
            if request.record.num_preemptions:
                request.record.resumed()
            else:
                self.num_looked_up += request.prompt_len
            self._count_found(request, found + self._load(request))
            insort(self.running, request, key=_order)
            owed, owed_low = owed + needed + len(self.config.windows), owed_low + low
        return False

    def _has_free(self, num_pages: int, num_low_pages: int) -> bool:
        """Tells whether so many pages and so many for demoted ones are free."""
        allocators = self.allocators
        return num_pages <= allocators.pages.num_free and num_low_pages <= allocators.low.num_free

    def _is_ready(self) -> bool:
        """Tells whether anything that runs has something to compute."""
        return any(request.num_pending for request in self.running)

    def _owed_pages(self) -> int:
        """Counts the pages that running requests still need for the tokens that they have, and are
        likely to need soon.
        """
        owed = sum(self._pages_to_come(request) for request in self.running)
        soon = len(self.running) * len(self.config.windows)
        return owed + soon + int(WATERMARK * self.config.num_pages)

    def _pages_to_come(self, request: Request) -> int:
        hold = request.hold
        missing = min(request.num_tokens, hold.evict_len) - hold.room_len
        num_pages = self.allocator.pages_for(missing)
        if not self.config.has_windows:
            return max(0, num_pages) * len(hold.parts)
        held = ((len(part.pages), part.window) for part in hold.parts)
        left = (self.config.held_pages(num + num_pages, window) - num for num, window in held)
        return sum(max(0, num) for num in left)

    def _low_pages_to_come(self, request: Request) -> int:
        """Counts the pages that are still to be demoted, those of all its tokens: as long as it
        runs it gives none of them back.
        """
        retention, kept = request.hold.retention, request.hold.kept
        if retention is None or kept is None:
            return 0
        return max(0, retention.low_pages_for(request.max_len) - len(kept.low))

    def _plan_loop(self, ready: list[Request]) -> LoopPlan | None:
        left = [request.max_len - request.num_tokens for request in ready]
        # With others waiting, stop as soon as the first row is done: its place goes to one of them.
        num_steps = min(self.loop_steps, min(left) if self.waiting else max(left))
        if waits := sum(request.rests for request in ready):
            # Each gets one token of a loop and then rests: as long as there are rows that go on for
            # it, but no longer.
            num_steps = max(1, min(num_steps, (len(ready) - waits) // waits))
            left = [1 if r.rests else num for r, num in zip(ready, left, strict=True)]
        pairs = zip(ready, left, strict=True)
        wanted = [(request, num if num < num_steps else num_steps) for request, num in pairs]
        if self.thinking:
            wanted = [(request, min(num, request.num_free)) for request, num in wanted]
        if self.bounded:
            wanted = [
                (request, min(num, request.hold.evict_len - request.hold.num_stored))
                for request, num in wanted
            ]
        work = self._reserve_all(wanted)
        if not work:
            return None
        return LoopPlan(self._by_length(work), *self._beside(work), num_steps=num_steps)

    def _by_length(self, work: list[tuple[Request, int]]) -> list[tuple[Request, int]]:
        """Lists decode rows by what they hold: attention sweeps neighbouring rows together, as far
        as the longest one goes.
        """
        are_whole = not self.bounded and 0 in self.config.windows
        return sorted(work, key=_num_stored if are_whole else _num_held)

    def _beside(self, work: list[tuple[Request, int]]) -> tuple[Pairs, Pairs, Pairs, Measures]:
        """Returns what a plan of this work has beside it: measured are pages of those whose policy
        is asked next.
        """
        copies = tuple(pair for pairs in self._copies.values() for pair in pairs)
        state_copies = tuple(self._state_copies)
        if not self.bounded:
            return copies, (), state_copies, ()
        asked = [
            request.hold
            for request, count in work
            if request.hold.evict_len <= request.hold.num_stored + count < request.max_len - 1
        ]
        return copies, self.eviction.demotions, state_copies, self.eviction.measures(asked)

    def _plan_step(self) -> StepPlan | None:
        decoding = [request for request in self.running if request.num_pending == 1]
        budget = self._step_tokens(len(decoding))
        work = [(request, 1) for request in decoding[:budget]]
        budget -= len(work)
        coming: set[PageKey] = set()
        for request in self.running:
            if request.num_pending <= 1 or budget <= 0:
                continue
            self._catch_up(request)
            if self._is_next(request, coming):
                count = min(budget, request.num_ready)
                self._expect(request, count, coming)
                work.append((request, count))
                budget -= count
        work = self._reserve_all(sorted(work, key=lambda item: item[0].order))
        if not work:
            return None
        # A prompt's last token alone is a decode row too.
        decode = self._by_length([item for item in work if item[1] == 1])
        whole = decode + [item for item in work if item[1] > 1]
        return StepPlan(whole, *self._beside(work))

    def _step_tokens(self, num_decoding: int) -> int:
        """Returns the most tokens of the next step: what is pending, or as many as fill the next
        smaller program exactly where that step and those that follow with what is left cost less
        than one that is mostly padding.
        """
        wanted = min(
            self.config.max_num_batched_tokens, sum(request.num_ready for request in self.running)
        )
        buckets = token_buckets(self.config.max_num_batched_tokens)
        return _cheapest(buckets, wanted, num_decoding)[1]

    def _reserve_all(self, work: list[tuple[Request, int]]) -> list[tuple[Request, int]]:
        """Reserves pages for so many more tokens of each request, which come in order. Returns what
        of the work is left: where no pages are free, the last running ones give theirs back, maybe
        some of these.
        """
        short, is_search = [], False
        for request, count in work:
            hold = request.hold
            length = hold.num_stored + count
            if length > hold.room_len:
                short.append((hold, length))
            if request.beams:
                is_search = True
        if not is_search:
            with suppress(CapacityError):
                self.allocators.extend(short)
                return work
        for request, count in work:
            self._reserve(request, request.hold.num_stored + count)
        return [item for item in work if item[0].row is not None]

    def _reserve(self, request: Request, length: int) -> None:
        hold = request.hold
        while request.row is not None:
            try:
                # Only beams share the page that they write to.
                if request.beams and (copies := hold.own_tail()):
                    self._copies[request] = copies
                if length > hold.room_len:
                    self.allocators.extend([(hold, length)])
                return
            except CapacityError:
                self._make_room()

    def _preempt(self, request: Request) -> None:
        self._publish(request)
        self._release(request)
        self.num_preemptions += 1
        request.record.preempted()
        insort(self.waiting, request, key=_order)

    def _trim(self) -> None:
        """Asks the policies of requests whose budget is reached, in order, which pages stay."""
        for request in [request for request in self.running if request.is_due]:
            if request.row is None:  # one before it has pushed it out
                continue
            self._publish(request)
            while request.is_due:  # until it is done, or preempted
                try:
                    self.eviction.ask(request.hold)
                except CapacityError:
                    self._make_room()

    def _note_moves(self) -> None:
        """Has pages noted from now on that tiers are to keep, and none that were before."""
        if self.tiers is not None:
            self.allocator.evicted = []
            self.allocator.listed_now = None if self.tiers.disk is None else []

    @property
    def is_loading(self) -> bool:
        """Tells whether the request that is admitted next waits for pages from a disk."""
        if self.tiers is None or not self.waiting:
            return False
        return self.tiers.is_coming(self.waiting[0].hold)

    def _read(self, request: Request, *, is_first: bool) -> None:
        """Has pages of a request that waits read from a disk, if it has any that pay."""
        # A beam is not made to wait, as others of its search may wait for it.
        if self.tiers is not None and not request.num_coming and not request.beams:
            self.tiers.read_ahead(
                request.hold,
                request.tokens,
                self.most_cached(request),
                self.allocators,
                is_first=is_first,
                is_busy=bool(self.running),
            )

    def _load(self, request: Request) -> int:
        """Goes on with pages from host memory and a disk where no more are on the device; returns
        how many tokens they have. They are written before the next step.
        """
        if self.tiers is None:
            return 0
        before = request.hold.num_stored
        loads = self.tiers.load(request.hold, request.tokens, self.most_cached(request))
        if loads:
            self._loads[request] = loads
        return request.hold.num_stored - before

    def take_moves(self) -> tuple[list[PageAndKey], list[PageAndKey], list[tuple[int, HostPage]]]:
        """Returns pages that were listed and pages that leave the device, both to be copied to host
        memory, with their keys, and then pages to be written from there: before anything else
        writes or reads pages.
        """
        listed, evicted = self.allocator.listed_now or [], self.allocator.evicted or []
        loads = [load for loads in self._loads.values() for load in loads]
        self._note_moves()
        self._loads.clear()
        return listed, evicted, loads

    def forget(self) -> None:
        """Makes nothing that is computed so far be found again, nor what requests list later."""
        if self.tiers is not None:
            self.tiers.clear()
        self._note_moves()
        self.allocator.forget()
        for request in (*self.running, *self.leaving):
            request.hold.is_listed = False

    def start_over(self) -> None:
        """Preempts every request and forgets what was cached: the pages' contents are lost. Those
        whose last tokens are coming need no pages any more, but for beams, whose searches go on
        only when all have what they have stored.
        """
        for request in sorted(self.leaving, key=_order):
            self._give_back(request)
        for request in list(self.running):
            if request.num_tokens == request.max_len and not request.beams:
                self._release(request)
            else:
                self._preempt(request)
        self._state_copies.clear()
        self._note_moves()
        self.allocator.forget()

    def start_again(self, requests: Collection[Request]) -> None:
        """Has all of these wait and forgets everything else, whatever state it was left in."""
        outcomes = self.eviction.outcomes
        if self.tiers is not None:
            self.tiers.start_again()
        self._begin()
        self.eviction.outcomes = outcomes
        self.adapters.start_again()
        for request in requests:
            if request.row is not None:
                request.record.preempted()
                self.num_preemptions += 1
            request.row = None
            request.num_tokens = len(request.tokens)
            request.hold.start_again()
        self.waiting = sorted(requests, key=_order)

    # --- the prefix cache

    def _take_cached(self, request: Request) -> int:
        """Extends what the request holds by the cached pages that follow; returns their tokens."""
        return request.hold.take_cached(request.tokens, self.most_cached(request))

    def most_cached(self, request: Request) -> int:
        """Returns how many of its first tokens may be cached ones: where rows have recurrent
        states, there have to be snapshots of those.
        """
        are_there = not self.config.has_states or self.allocator.snapshots.num_slots > 0
        return request.most_cached if are_there else 0

    def _begin_state(self, request: Request) -> None:
        """Has the state copied that the request goes on from, if it does from a cached one."""
        hold = request.hold
        if hold.source is not None and request.row is not None:
            self._state_copies.append((hold.source, request.row))
            hold.source = None

    def _publish(self, request: Request) -> None:
        """Lists the request's full pages for others, unless some are still to be loaded."""
        if request in self._loads:
            return
        request.hold.publish(request.tokens, request.num_known)

    def _catch_up(self, request: Request) -> None:
        """Takes over what others have computed by now of what comes next in the request."""
        self._count_found(request, self._take_cached(request))
        self._begin_state(request)

    def _is_next(self, request: Request, coming: set[PageKey]) -> bool:
        """Tells whether to compute the request's next page now, and not take it over from another
        one after this step.
        """
        index = request.hold.next_page(self.most_cached(request))
        return index is None or request.hold.key(index, request.tokens) not in coming

    def _count_found(self, request: Request, num_tokens: int) -> None:
        # Not of a preempted request: its own pages would count as hits. Nor of forced tokens.
        if not request.record.num_preemptions and not request.num_new:
            self.num_found += num_tokens
            request.record.num_cached += num_tokens

    def _expect(self, request: Request, count: int, coming: set[PageKey]) -> None:
        """Adds the pages that the next `count` tokens fill."""
        hold, size = request.hold, self.config.block_size
        if self.config.has_states and hold.num_stored + count not in hold.goals:
            return  # without the state nobody goes on from them
        if hold.is_whole:
            first, end = hold.num_stored // size, (hold.num_stored + count) // size
            coming.update(hold.key(index, request.tokens) for index in range(first, end))

    def check(self) -> None:
        """Raises RuntimeError if pages, rows or order do not add up."""
        self.adapters.check(request.draw.adapter for request in self.running)
        self.allocators.check([request.hold for request in (*self.running, *self.leaving)])
        if self.bounded != {one for one in self.running if one.hold.retention is not None}:
            raise RuntimeError("requests with a policy are not the running ones that have one")
        self.eviction.check({request.hold for request in self.bounded})
        rows = [request.row for request in self.running] + self._free_rows
        if sorted(rows, key=str) != sorted(range(self.config.max_num_seqs), key=str):
            raise RuntimeError(
                f"rows owned or free: {rows}, expected each of {self.config.max_num_seqs} once"
            )
        for name, listed in (("running", self.running), ("waiting", self.waiting)):
            if listed != sorted(listed, key=_order):
                raise RuntimeError(f"{name} requests are out of order")
        if any(one.row is not None or not one.hold.is_empty for one in self.waiting):
            raise RuntimeError("a waiting request holds a row or pages")


def _order(request: Request) -> tuple[int, int]:
    return request.order


def _num_stored(item: tuple[Request, int]) -> int:
    return item[0].hold.num_stored


def _num_held(item: tuple[Request, int]) -> int:
    hold = item[0].hold
    return hold.num_stored - hold.parts[0].num_gone


def _cheapest(buckets: tuple[int, ...], num_tokens: int, num_decoding: int) -> tuple[int, int]:
    """Returns (least cost, tokens of the first step) of steps for so many tokens; every step has
    the rows that decode.
    """
    whole = fit_bucket(buckets, num_tokens) + STEP_COST
    smaller = max((bucket for bucket in buckets if bucket < num_tokens), default=0)
    if smaller <= num_decoding or smaller + 2 * STEP_COST >= whole:
        return whole, num_tokens
    rest, _ = _cheapest(buckets, num_tokens - smaller + num_decoding, num_decoding)
    cut = smaller + STEP_COST + rest
    return (cut, smaller) if cut < whole else (whole, num_tokens)
