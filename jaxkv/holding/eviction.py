"""Decides which pages stay when a policy is asked: holds under a budget let go of the others."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from jaxkv.holding.allocator import KVHandle
from jaxkv.holding.hold import Allocators, Hold, Kept, Measures, Pairs
from jaxkv.holding.retention import Retention
from jaxkv.kv.policies import DEMOTE, DROP, KEEP, Held, Room


class Eviction:
    """Asks policies which pages stay, and keeps the demotions that this plans until they are made.

    A policy is asked at fixed lengths of a sequence, so what is computed for it does not depend on
    its neighbours.
    """

    def __init__(self, allocators: Allocators) -> None:
        self.low = allocators.low
        self.outcomes = Counter(kept=0, demoted=0, dropped=0, demoted_dropped=0)
        """Pages that policies were asked about, by what became of them."""
        self._demotions: dict[Hold, Pairs] = {}

    @property
    def demotions(self) -> Pairs:
        """Lists what is to be encoded anew before the next step, in this order."""
        return tuple(pair for pairs in self._demotions.values() for pair in pairs)

    def done(self) -> None:
        """Notes that all demotions are made."""
        self._demotions.clear()

    def forget(self, hold: Hold) -> None:
        """Drops the demotions of a hold that is released."""
        self._demotions.pop(hold, None)

    def check(self, holds: set[Hold]) -> None:
        """Raises RuntimeError if anything is to be demoted for a hold that is none of these."""
        if not self._demotions.keys() <= holds:
            raise RuntimeError("a page is to be demoted for a hold that nobody has any more")

    def measures(self, holds: list[Hold]) -> Measures:
        """Returns what the policies of these holds, which are asked next, want measured."""
        wanted: list[tuple[Kept, list[int]]] = []
        for hold in holds:
            kept, retention = hold.kept, hold.retention
            if kept is None or retention is None or retention.policy.measure is None:
                continue
            wanted.append((kept, hold.parts[0].pages[: retention.full_pages]))
        return tuple(wanted)

    def ask(self, hold: Hold) -> None:
        """Lets go of the pages that the policy of the hold does not keep.

        Raises: CapacityError if there are too few pages for what is to be demoted. Demoted pages
        that do not stay are gone then, and nothing else has changed.
        """
        retention, kept = hold.retention, hold.kept
        if retention is None or kept is None:
            raise RuntimeError("expected a hold under a budget, got one without")
        num_pages, pages = retention.full_pages, hold.parts[0].pages
        if retention.policy.measure is not None and kept.measured is None:
            raise RuntimeError(f"kv_policy {retention.policy.name}: nobody measured its pages")
        firsts_W = hold.parts[0].firsts(num_pages)
        decision = decide(retention, kept, firsts_W)
        while lost := [i for i in range(len(kept.low)) if i not in decision.low]:
            self._drop_low(kept, lost)
            decision = decide(retention, kept, firsts_W)
        new = self.low.take(len(decision.demoted))
        if new:
            demoted = (pages[i] for i in decision.demoted)
            self._demotions[hold] = tuple(zip(demoted, new, strict=True))
        _go_on(retention, kept, firsts_W, decision, new)
        gone = set(range(num_pages)) - set(decision.full)
        hold.trim(gone)
        self.outcomes["kept"] += len(decision.full)
        self.outcomes["demoted"] += len(new)
        self.outcomes["dropped"] += len(gone) - len(new)

    def _drop_low(self, kept: Kept, lost: list[int]) -> None:
        """Gives demoted pages back first, since others may need the room: a beam's may still hold
        them.
        """
        self.low.release(KVHandle(tuple(kept.low[i] for i in lost)))
        stay = [i for i in range(len(kept.low)) if i not in lost]
        mass = kept.low_mass[stay]
        kept.low, kept.low_first = [kept.low[i] for i in stay], [kept.low_first[i] for i in stay]
        kept.low_mass[:] = 0
        kept.low_mass[: len(stay)] = mass
        self.outcomes["demoted_dropped"] += len(lost)


def _go_on(
    retention: Retention, kept: Kept, firsts_W: np.ndarray, decision: Decision, new: list[int]
) -> None:
    """Leaves in `kept` what stays: demoted pages, `new` ones among them, and what was observed."""
    num_low = len(kept.low)
    firsts_of_low = [*kept.low_first, *(int(firsts_W[i]) for i in decision.demoted)]
    masses_of_low = np.concatenate([kept.low_mass[:num_low], kept.mass[decision.demoted]])
    pages_of_low = [*kept.low, *new]
    mass = kept.mass[decision.full]
    kept.low = [pages_of_low[i] for i in decision.low]
    kept.low_first = [firsts_of_low[i] for i in decision.low]
    kept.mass[:], kept.low_mass[:], kept.measured = 0, 0, None
    if retention.policy.observes is None:
        kept.mass[: len(mass)] = mass
        kept.low_mass[: len(decision.low)] = masses_of_low[decision.low]


@dataclass(frozen=True, slots=True)
class Decision:
    """Says which pages stay, by their indices in the two tables.

    demoted: pages of the first table that go into the second. `low` has the second table in order,
    numbers from len(old table) on standing for the demoted ones.
    """

    full: list[int]
    demoted: list[int]
    low: list[int]


def decide(retention: Retention, kept: Kept, firsts_W: np.ndarray) -> Decision:
    """Returns what the policy says of a sequence with `full_pages` full pages, whose first slots
    have these positions.

    Raises: RuntimeError if it breaks its word.
    """
    num_low, num_pages = len(kept.low), retention.full_pages
    first_W = np.concatenate([firsts_W, np.array(kept.low_first, np.int64)])
    is_low_W = np.arange(num_pages + num_low) >= num_pages
    protected_W = np.concatenate(
        [retention.is_protected(first_W[:num_pages]), np.zeros(num_low, bool)]
    )
    mass_W = np.concatenate([kept.mass[:num_pages], kept.low_mass[:num_low]])
    order = np.argsort(first_W)
    measured_W = np.zeros((num_pages, 0)) if kept.measured is None else kept.measured[:num_pages]
    of_low = np.zeros((num_low, *measured_W.shape[1:]))
    held = Held(
        first_W=first_W[order],
        is_low_W=is_low_W[order],
        is_protected_W=protected_W[order],
        mass_W=mass_W[order],
        measured_W=np.concatenate([measured_W, of_low])[order],
    )
    room = Room(num_pages - retention.step, retention.low_pages)
    chosen = np.empty(len(order), np.int8)
    chosen[order] = retention.policy.select(held, room)
    full = np.flatnonzero((chosen == KEEP) & ~is_low_W)
    demoted = np.flatnonzero((chosen == DEMOTE) & ~is_low_W)
    low = np.flatnonzero(((chosen == KEEP) & is_low_W) | ((chosen == DEMOTE) & ~is_low_W))
    lost = np.any(chosen[protected_W] != KEEP) or np.any(chosen[is_low_W] == DEMOTE)
    if (
        lost
        or len(full) > room.full
        or len(low) > room.low
        or not np.isin(chosen, (KEEP, DEMOTE, DROP)).all()
    ):
        name, given = retention.policy.name, f"{len(full)} full and {len(low)} demoted pages"
        raise RuntimeError(
            f"kv_policy {name}: expected protected pages and at most {room} to stay, got {given}"
        )
    low = low[np.argsort(first_W[low])]
    place_W = np.arange(len(order)) - num_pages  # in the table of demoted pages
    place_W[demoted] = num_low + np.arange(len(demoted))
    return Decision(full.tolist(), demoted.tolist(), place_W[low].tolist())
