"""Names what runs next, as the scheduler decides it."""

from __future__ import annotations

from dataclasses import dataclass

from jaxkv.holding.hold import Measures, Pairs
from jaxkv.requests.request import Request


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Plans one ragged step: (request, number of its pending tokens to compute), those with one
    token in this step first, shortest first. `copies` of pages, (source, target), come before it,
    in this order, and before those `demotions`. `measures`: pages of which policies want to know
    something once the step has filled them. `state_copies`: slots of recurrent states, likewise.
    """

    work: list[tuple[Request, int]]
    copies: Pairs = ()
    demotions: Pairs = ()
    measures: Measures = ()
    state_copies: Pairs = ()

    @property
    def requests(self) -> list[Request]:
        return [request for request, _ in self.work]


@dataclass(frozen=True, slots=True)
class LoopPlan:
    """Plans up to `num_steps` decode steps on the device: (request, tokens that it may get),
    shortest first; their pages are reserved. The rest as in `StepPlan`.
    """

    work: list[tuple[Request, int]]
    num_steps: int
    copies: Pairs = ()
    demotions: Pairs = ()
    measures: Measures = ()
    state_copies: Pairs = ()

    @property
    def requests(self) -> list[Request]:
        return [request for request, _ in self.work]
