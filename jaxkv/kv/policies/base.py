"""Policies: which of a request's pages stay when its cache has reached its budget.

A policy is a frozen value with a name, and pure: the same pages and figures give the same answer.
It promises:
- it works on whole, full pages of all layers, and says of each to keep it, to demote it (to store
  it anew in the codec `low`, in less room) or to drop it; protected pages are kept, demoted ones
  are kept as they are or dropped;
- what it leaves fits the `Room`;
- what it asks to be measured is little: sums that attention makes on the way
  (`kv.state.Statistics`), or lengths of keys and values (`kv.state.page_norms`).

The engine protects the first page of a sequence (attention sinks, arXiv 2309.17453), the recent
ones and the spans that
a caller names, and asks at fixed places of a sequence: what a request computes does not depend on
its neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

KEEP, DEMOTE, DROP = 0, 1, 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """The full pages that a request holds, arrays [W] in order of position.

    first_W: position of slot 0. is_low_W: demoted already. is_protected_W: stays as it is. mass_W:
    softmax weights that they got (`Statistics.mass_BW`), 0 where nothing is observed. key_norm_W,
    value_norm_W: mean lengths, None unless the policy needs them.
    """

    first_W: np.ndarray
    is_low_W: np.ndarray
    is_protected_W: np.ndarray
    mass_W: np.ndarray
    key_norm_W: np.ndarray | None = None
    value_norm_W: np.ndarray | None = None


class Room(NamedTuple):
    """Most pages that may stay: as they are, and demoted."""

    full: int
    low: int


class Policy(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def observes(self) -> int | None:
        """How many queries before a decision are asked what they attend to; None: all since the
        beginning, which is kept from decision to decision.
        """
        ...

    @property
    def focused(self) -> bool:
        """Whether a query head counts the less the more evenly it attends (`Statistics`)."""
        ...

    @property
    def needs_norms(self) -> bool: ...

    @property
    def low(self) -> str | None:
        """The codec of demoted pages; None: nothing is demoted."""
        ...

    @property
    def reads_some(self) -> bool:
        """Whether everything is kept, and the budget is what a decoding query reads of it. It is
        never asked then.
        """
        ...

    def select(self, held: Held, room: Room) -> np.ndarray:
        """KEEP, DEMOTE or DROP for each page, int8 [W]."""
        ...


def keep_best(score_W: np.ndarray, held: Held, room: Room) -> np.ndarray:
    """The pages of the highest score stay as they are, the next are demoted as far as there is
    room, the rest goes.

    Of equal ones the later page stays.
    """
    order = np.lexsort((held.first_W, score_W))[::-1]
    free = ~held.is_low_W & ~held.is_protected_W
    chosen_W = np.full(len(score_W), DROP, np.int8)
    chosen_W[held.is_protected_W] = KEEP
    num_left = room.full - int(np.count_nonzero(held.is_protected_W & ~held.is_low_W))
    kept = [page for page in order if free[page]][: max(0, num_left)]
    chosen_W[kept] = KEEP
    below = [
        page for page in order if held.is_low_W[page] or (free[page] and chosen_W[page] == DROP)
    ]
    for page in below[: room.low]:
        chosen_W[page] = KEEP if held.is_low_W[page] else DEMOTE
    return chosen_W
