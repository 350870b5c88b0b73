"""Rows under a policy: when it is asked, and what happens to the pages that do not stay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from jaxkv.config import EngineConfig
from jaxkv.engine.plan import Pairs
from jaxkv.holding.allocator import KVHandle, PageAllocator
from jaxkv.holding.retention import NEVER, Decision, Kept, decide
from jaxkv.requests.request import Request

Norms = Callable[[list[int]], tuple[np.ndarray, np.ndarray]]
"""Lengths of the keys and of the values of these pages, by `kv.state.page_norms`."""


class Trim:
    """Owns the demoted pages. Mutable, host only; `check` states its invariants.

    A request is asked at fixed lengths of its sequence, so what it computes does not depend on its
    neighbours. Pages
    that go are only given back by it: others that share them keep them, and they stay in the prefix
    cache.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.low = PageAllocator(config.num_low_pages, config.block_size)
        self.rows: set[Request] = set()
        """Running requests with a retention."""
        self.outcomes = Counter(kept=0, demoted=0, dropped=0, demoted_dropped=0)
        """Pages that policies were asked about, by what became of them."""
        self._demotions: dict[Request, Pairs] = {}

    @property
    def demotions(self) -> Pairs:
        """What is to be encoded anew before the next step, in this order."""
        return tuple(pair for pairs in self._demotions.values() for pair in pairs)

    @property
    def undone(self) -> Mapping[Request, Pairs]:
        """Demotions that were planned and not made."""
        return self._demotions

    def done(self) -> None:
        self._demotions.clear()

    def is_due(self, request: Request) -> bool:
        """Whether its policy is to be asked; not where only its last token is to come, which is
        never stored.
        """
        return (
            request in self.rows and request.evict_len <= request.num_stored < request.max_len - 1
        )

    @property
    def needs_statistics(self) -> bool:
        """Whether a policy is asked next that decides by what the steps so far have observed."""
        due = (request.retention for request in self.rows if self.is_due(request))
        return any(one is not None and one.policy.observes != 0 for one in due)

    def due(self, running: Iterable[Request]) -> list[Request]:
        """Those whose policy is to be asked, in order."""
        return [request for request in running if self.is_due(request)]

    def begin(self, request: Request) -> None:
        """Before a request runs: it holds its sequence from the beginning."""
        if request.retention is not None:
            request.kept, request.evict_len = Kept.whole(self.config), request.retention.limit
            self.rows.add(request)

    def end(self, request: Request) -> None:
        """When it does not run any more, its other pages given back."""
        if request.kept is not None:
            self.rows.discard(request)
            self._demotions.pop(request, None)
            self.low.release(KVHandle(tuple(request.kept.low)))
            request.kept, request.num_gone, request.evict_len = None, 0, NEVER

    def ask(self, request: Request, allocator: PageAllocator, norms: Norms | None) -> None:
        """Lets go of the pages that the request's policy does not keep.

        Raises: CapacityError if there are too few pages for what is to be demoted. Demoted pages
        that do not stay are gone then, and nothing else has changed.
        """
        retention, kept = request.retention, request.kept
        if retention is None or kept is None:
            raise RuntimeError(f"request {request.id} has no budget")
        num_pages, pages = retention.full_pages, request.pages
        measured = None
        if retention.policy.needs_norms:
            if norms is None:
                raise RuntimeError(f"kv_policy {retention.policy.name}: nobody measures its pages")
            measured = norms(pages[:num_pages])
        decision = decide(retention, kept, request.num_gone, measured)
        while lost := [i for i in range(len(kept.low)) if i not in decision.low]:
            self._drop_low(kept, lost)
            decision = decide(retention, kept, request.num_gone, measured)
        new = self.low.take(len(decision.demoted))
        gone = set(range(num_pages)) - set(decision.full)
        if new:
            self._demotions[request] = tuple(
                zip((pages[i] for i in decision.demoted), new, strict=True)
            )
        self._go_on(request, kept, decision, new)
        allocator.release(KVHandle(tuple(pages[i] for i in sorted(gone))))
        request.pages = [page for i, page in enumerate(pages) if i not in gone]
        request.num_gone += len(gone) * self.config.block_size
        request.evict_len, request.num_bound = request.num_gone + retention.limit, 0
        request.publish_len = NEVER
        self.outcomes["kept"] += len(decision.full)
        self.outcomes["demoted"] += len(new)
        self.outcomes["dropped"] += len(gone) - len(new)

    def _drop_low(self, kept: Kept, lost: list[int]) -> None:
        """First, since others may need the room: a beam's may still hold them."""
        self.low.release(KVHandle(tuple(kept.low[i] for i in lost)))
        stay = [i for i in range(len(kept.low)) if i not in lost]
        mass = kept.low_mass[stay]
        kept.low, kept.low_first = [kept.low[i] for i in stay], [kept.low_first[i] for i in stay]
        kept.low_mass[:] = 0
        kept.low_mass[: len(stay)] = mass
        self.outcomes["demoted_dropped"] += len(lost)

    def _go_on(self, request: Request, kept: Kept, decision: Decision, new: list[int]) -> None:
        """Tables and what was observed, without what has gone."""
        size, num_low = self.config.block_size, len(kept.low)
        firsts = (
            kept.firsts(request.retention.full_pages, request.num_gone, size)
            if request.retention
            else np.zeros(0)
        )
        firsts_of_low = [*kept.low_first, *(int(firsts[i]) for i in decision.demoted)]
        masses_of_low = np.concatenate([kept.low_mass[:num_low], kept.mass[decision.demoted]])
        pages_of_low = [*kept.low, *new]
        mass = kept.mass[decision.full]
        kept.first = [int(firsts[i]) for i in decision.full]
        kept.low = [pages_of_low[i] for i in decision.low]
        kept.low_first = [firsts_of_low[i] for i in decision.low]
        kept.mass[:], kept.low_mass[:] = 0, 0
        if request.retention is not None and request.retention.policy.observes is None:
            kept.mass[: len(mass)] = mass
            kept.low_mass[: len(decision.low)] = masses_of_low[decision.low]

    def check(self, running: Iterable[Request]) -> None:
        """Raises RuntimeError if demoted pages, rows or budgets do not add up."""
        size, rows = (
            self.config.block_size,
            {request for request in running if request.retention is not None},
        )
        kept = [request.kept for request in rows if request.kept is not None]
        if rows != self.rows or len(kept) != len(rows):
            raise RuntimeError("rows under a policy are not the running requests that have one")
        self.low.check(KVHandle(tuple(one.low), len(one.low) * size) for one in kept)
        for request in rows:
            if request.retention is None or request.num_stored > request.evict_len:
                raise RuntimeError(
                    f"request {request.id} has {request.num_stored} tokens, at most "
                    f"{request.evict_len}"
                )
            if request.evict_len != request.num_gone + request.retention.limit:
                raise RuntimeError(
                    f"request {request.id}: its policy is asked at {request.evict_len}"
                )
