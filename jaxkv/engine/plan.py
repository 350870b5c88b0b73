"""Names what runs next, as the scheduler decides it."""

from __future__ import annotations

from dataclasses import dataclass, field

from jaxkv.holding.hold import Measures, Pairs
from jaxkv.requests.request import Request


@dataclass(frozen=True, slots=True)
class Plan:
    """Says how many tokens each request gets, and what runs around that: before it `copies` of
    pages, (source, target), in this order, then `demotions`, and copies of recurrent states from
    slot to slot; behind it, `measures` takes pages of which policies want to know something.
    """

    work: list[tuple[Request, int]]
    copies: Pairs = ()
    demotions: Pairs = ()
    state_copies: Pairs = ()
    measures: Measures = ()

    @property
    def requests(self) -> list[Request]:
        return [request for request, _ in self.work]


class StepPlan(Plan):
    """Plans one ragged step: (request, number of its pending tokens to compute), those with one
    token in this step first, shortest first.
    """

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class LoopPlan(Plan):
    """Plans up to `num_steps` decode steps on the device: (request, tokens that it may get),
    shortest first; their pages are reserved.
    """

    num_steps: int = field(kw_only=True)
