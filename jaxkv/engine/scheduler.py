"""Which requests run next, and how many of their tokens: decode rows first, prefill chunks fill the token budget."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from jaxkv.aot import fit_bucket, token_buckets
from jaxkv.config import EngineConfig
from jaxkv.engine.allocator import PageAllocator
from jaxkv.engine.request import Request

STEP_COST = 64
"""What a step costs however few its tokens, counted in tokens: it reads all weights (measured on a CPU)."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One ragged step: (request, number of its pending tokens to compute), those with one token in this step first,
    shortest first."""

    work: list[tuple[Request, int]]


@dataclass(frozen=True, slots=True)
class LoopPlan:
    """Up to `num_steps` decode steps on the device for these requests, shortest first; their pages are reserved."""

    requests: list[Request]
    num_steps: int


class Scheduler:
    """First come, first served. Mutable, host only; `check` states its invariants.

    A request is admitted when the pages that it can ever need are not promised to others, so a running request never
    runs out of pages; the pages themselves are taken as its tokens come.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.allocator = PageAllocator(config.num_pages, config.block_size)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_promised = 0
        self._free_rows = list(range(config.max_num_seqs - 1, -1, -1))

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def plan(self) -> StepPlan | LoopPlan | None:
        """The next thing to run with its pages reserved, or None if there is nothing to do."""
        self._admit()
        if not self.running:
            return None
        if all(request.num_pending == 1 for request in self.running):
            return self._plan_loop()
        return self._plan_step()

    def remove(self, request: Request) -> None:
        """Takes a waiting or running request out and frees what it holds."""
        if request.row is None:
            self.waiting.remove(request)
            return
        self.running.remove(request)
        self._free_rows.append(request.row)
        self.num_promised -= self.allocator.pages_for(request.max_len)
        self.allocator.release(request.handle)

    def _admit(self) -> None:
        # In order: a request that does not fit yet holds back those behind it, or it could wait forever.
        while self.waiting and self._free_rows:
            needed = self.allocator.pages_for(self.waiting[0].max_len)
            if self.num_promised + needed > self.config.num_pages:
                return
            request = self.waiting.popleft()
            request.row = self._free_rows.pop()
            self.num_promised += needed
            self.running.append(request)

    def _plan_loop(self) -> LoopPlan:
        left = [request.num_left for request in self.running]
        # With others waiting, stop as soon as the first row is done: its place goes to one of them.
        num_steps = min(self.config.decode_steps, min(left) if self.waiting else max(left))
        num_steps = 1 if any(request.needs_host for request in self.running) else num_steps
        for request in self.running:
            self._reserve(request, min(num_steps, request.num_left))
        return LoopPlan(sorted(self.running, key=_length), num_steps)

    def _plan_step(self) -> StepPlan:
        decoding = [request for request in self.running if request.num_pending == 1]
        budget = self._step_tokens(len(decoding))
        work = [(request, 1) for request in decoding[:budget]]
        budget -= len(work)
        for request in self.running:
            if request.num_pending > 1 and budget > 0:
                count = min(budget, request.num_pending)
                work.append((request, count))
                budget -= count
        for request, count in work:
            self._reserve(request, count)
        # A prompt's last token alone is a decode row too.
        decode = sorted((item for item in work if item[1] == 1), key=lambda item: _length(item[0]))
        return StepPlan(decode + [item for item in work if item[1] > 1])

    def _step_tokens(self, num_decoding: int) -> int:
        """Most tokens of the next step: what is pending, or as many as fill the next smaller program exactly where two
        steps, the second one with what is left, cost less than one that is mostly padding."""
        wanted = min(self.config.max_num_batched_tokens, sum(request.num_pending for request in self.running))
        buckets = token_buckets(self.config.max_num_batched_tokens)
        smaller = max((bucket for bucket in buckets if bucket < wanted), default=0)
        if smaller <= num_decoding:
            return wanted
        rest = fit_bucket(buckets, wanted - smaller + num_decoding)
        return smaller if smaller + rest + STEP_COST < fit_bucket(buckets, wanted) else wanted

    def _reserve(self, request: Request, num_tokens: int) -> None:
        request.handle = self.allocator.reserve(request.handle, request.handle.length + num_tokens)

    def check(self) -> None:
        """Raises RuntimeError if pages, rows or promises do not add up."""
        self.allocator.check(request.handle for request in self.running)
        rows = [request.row for request in self.running] + self._free_rows
        if sorted(rows, key=str) != sorted(range(self.config.max_num_seqs), key=str):
            raise RuntimeError(f"rows owned or free: {rows}, expected each of {self.config.max_num_seqs} once")
        promised = sum(self.allocator.pages_for(request.max_len) for request in self.running)
        if promised != self.num_promised or promised > self.config.num_pages:
            raise RuntimeError(f"{self.num_promised} pages promised, {promised} needed, {self.config.num_pages} exist")
        if any(request.row is not None for request in self.waiting):
            raise RuntimeError("a waiting request holds a row")


def _length(request: Request) -> int:
    """Decode rows are listed by length: attention sweeps neighbouring rows together, as far as the longest one goes."""
    return request.handle.length
