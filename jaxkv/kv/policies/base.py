"""Policies: which of a request's pages stay when its cache has reached its budget.

A policy is a frozen value with a name, and pure: the same pages and figures give the same answer.
It promises:
- it works on whole, full pages of all layers, and says of each to keep it, to demote it (to store
  it anew in the codec `low`, in less room) or to drop it; protected pages are kept, demoted ones
  are kept as they are or dropped;
- what it leaves fits the `Room`.

It decides by positions, and by what it asks to be known of the pages:
- `observes`: the softmax weights that they got, which attention adds up on the way
  (`kv.state.Statistics`);
- `measure`: any figures of what they hold, computed before a decision (`kv.state.measure_pages`).

The engine protects the first page of a sequence (attention sinks, arXiv 2309.17453), the recent
ones and the spans that a caller names, and asks at fixed places of a sequence: what a request
computes does not depend on its neighbours.

How to add a policy: a file here with a subclass of `Policy`, and its value in the list in
`kv/policies/__init__.py`. Whatever it measures is a function in that file.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import numpy as np

KEEP, DEMOTE, DROP = 0, 1, 2

Measure = Callable[[jax.Array, jax.Array], jax.Array]
"""Takes the keys and the values of W pages in one layer, decoded, two [W, K, S, H] float32, and
returns some figures of each page, [W, ...], in a shape that is the same for all KV groups. It is
pure and traced, and the requests of an engine share one.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """The full pages that a request holds, arrays [W] in order of position.

    first_W: position of slot 0. is_low_W: demoted already. is_protected_W: stays as it is. mass_W:
    softmax weights that they got (`Statistics.mass_BW`), 0 where nothing is observed. measured_W:
    [W, ...], what `Policy.measure` returned, means over layers; 0 for demoted pages, [W, 0] where
    nothing is measured.
    """

    first_W: np.ndarray
    is_low_W: np.ndarray
    is_protected_W: np.ndarray
    mass_W: np.ndarray
    measured_W: np.ndarray


class Room(NamedTuple):
    """Most pages that may stay: as they are, and demoted."""

    full: int
    low: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy(ABC):
    """Says which pages stay. A subclass names what differs from these fields, and selects.

    name      what people write as `kv_policy`.
    low       the codec of demoted pages; None: nothing is demoted.
    observes  how many queries before a decision are asked what they attend to; None: all since the
              beginning, and what they said is kept from decision to decision.
    focused   whether a query head counts the less the more evenly it attends (`Statistics`).
    measure   what is computed of pages before a decision; None: nothing.
    """

    name: str
    low: str | None = None
    observes: int | None = 0
    focused: bool = False
    measure: Measure | None = None

    @property
    def asks_backend(self) -> bool:
        """Tells whether it wants more of an attention backend than page tables with gaps: sums,
        pages that can be measured, or a second pool.
        """
        return self.low is not None or self.measure is not None or self.observes != 0

    @abstractmethod
    def select(self, held: Held, room: Room) -> np.ndarray:
        """Returns KEEP, DEMOTE or DROP for each page, int8 [W]."""


def keep_best(score_W: np.ndarray, held: Held, room: Room) -> np.ndarray:
    """Keeps the pages of the highest score as they are, the next are demoted as far as there is
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
