"""What a request keeps of its cache: how many pages a budget allows, and which ones it holds once
some have gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from jaxkv.config import EngineConfig, is_int
from jaxkv.kv.policies import DEMOTE, DROP, KEEP, Held, Policy, Room

FULL_SHARE = 0.5
"""Part of a budget that pages in full precision take where a policy demotes others."""

FEWEST_PAGES = 4
"""In full precision: the first of a sequence, a recent one, one to choose, and one that goes."""

NEVER = 1 << 62
"""A number of tokens that no request reaches."""

Spans = tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Retention:
    """How one request's cache is bounded. When `full_pages` pages are full, `policy` says which of
    them stay, some `step` fewer; at most `low_pages` are held demoted. `protected`: token
    positions, begin and end of each span.
    """

    policy: Policy
    page_size: int
    full_pages: int
    low_pages: int
    protected: Spans = ()

    @property
    def limit(self) -> int:
        """Tokens that are held in full precision when the policy is asked."""
        return self.full_pages * self.page_size

    @property
    def step(self) -> int:
        """Pages that have gone or been demoted after it was: an eighth, so that the chunks of a
        long prompt, which end where it is asked, are not too short.
        """
        return max(1, self.full_pages // 8)

    @property
    def recent(self) -> int:
        """The last pages, which stay."""
        return max(1, self.full_pages // 4)

    @property
    def cached_len(self) -> int:
        """The first tokens, which may come out of the prefix cache: nothing that the policy decides
        by is missed, and something is left to compute before it is asked.
        """
        observes = self.policy.observes
        return 0 if observes is None else max(0, self.limit - max(observes, self.page_size))

    def is_protected(self, first_W: np.ndarray) -> np.ndarray:
        """Of the full pages with these first positions, in order, and more in full precision than
        are demoted.
        """
        protected_W = np.zeros(len(first_W), bool)
        for begin, end in self.protected:
            protected_W |= (first_W < end) & (first_W + self.page_size > begin)
        protected_W[0] = True
        protected_W[len(first_W) - self.recent :] = True
        return protected_W

    def since(self, evict_len: int) -> int:
        """The position from which on queries are observed before the policy is asked at that
        length.
        """
        observes = self.policy.observes
        return 0 if observes is None else max(0, evict_len - observes)


@dataclass(slots=True)
class Kept:
    """What a running request holds of its sequence: pages that are no longer consecutive, and
    demoted ones.

    first: positions of its first pages; those past them follow each other. low, low_first: demoted
    pages and their
    positions. mass, low_mass: softmax weights that the pages of both tables got, as wide as those.
    """

    mass: np.ndarray
    low_mass: np.ndarray
    first: list[int] = field(default_factory=list)
    low: list[int] = field(default_factory=list)
    low_first: list[int] = field(default_factory=list)

    @classmethod
    def whole(cls, config: EngineConfig) -> Kept:
        """Nothing has gone."""
        return cls(np.zeros(config.table_width), np.zeros(config.low_row_pages))

    def copy(self) -> Kept:
        """Of a sequence that may go on otherwise."""
        lists: Any = {name: list(getattr(self, name)) for name in ("first", "low", "low_first")}
        return replace(self, mass=self.mass.copy(), low_mass=self.low_mass.copy(), **lists)

    def firsts(self, num_pages: int, num_gone: int, page_size: int) -> np.ndarray:
        """Positions of the first slots of so many pages, where so many tokens before the last ones
        have gone.
        """
        follow = num_gone + np.arange(len(self.first), num_pages) * page_size
        return np.concatenate([np.array(self.first, np.int64), follow])


@dataclass(frozen=True, slots=True)
class Decision:
    """Which pages stay, by their indices in the two tables; demoted: pages of the first that go
    into the second. `low` has the second table in order, numbers from len(old table) on standing
    for the demoted ones.
    """

    full: list[int]
    demoted: list[int]
    low: list[int]


def decide(
    retention: Retention,
    kept: Kept,
    num_gone: int,
    norms: tuple[np.ndarray, np.ndarray] | None = None,
) -> Decision:
    """What the policy says of a request whose `full_pages` pages are full, and of which so many
    tokens have gone.

    Raises: RuntimeError if it breaks its word.
    """
    num_low, num_pages, size = len(kept.low), retention.full_pages, retention.page_size
    first_W = np.concatenate(
        [kept.firsts(num_pages, num_gone, size), np.array(kept.low_first, np.int64)]
    )
    is_low_W = np.arange(num_pages + num_low) >= num_pages
    protected_W = np.concatenate(
        [retention.is_protected(first_W[:num_pages]), np.zeros(num_low, bool)]
    )
    mass_W = np.concatenate([kept.mass[:num_pages], kept.low_mass[:num_low]])
    order = np.argsort(first_W)

    def in_order(x: np.ndarray | None) -> Any:
        return None if x is None else np.concatenate([x, np.zeros(num_low)])[order]

    key_W, value_W = (None, None) if norms is None else norms
    held = Held(
        first_W=first_W[order],
        is_low_W=is_low_W[order],
        is_protected_W=protected_W[order],
        mass_W=mass_W[order],
        key_norm_W=in_order(key_W),
        value_norm_W=in_order(value_W),
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
    # In the table of demoted pages: those of `full` that go there come as numbers from its length
    # on.
    places = [
        int(page) - num_pages if is_low_W[page] else num_low + demoted.tolist().index(int(page))
        for page in low
    ]
    return Decision(full.tolist(), demoted.tolist(), places)


def full_pages(policy: Policy, budget: Any, *, page_size: int) -> int:
    """Pages in full precision that a budget allows: so many tokens' bytes in full precision, or
    half of them where the
    policy demotes pages. Raises: ValueError for a budget that is too small.
    """
    share = FULL_SHARE if policy.low else 1.0
    fewest = int(FEWEST_PAGES * page_size / share)
    if not is_int(budget) or budget < fewest:
        what = (
            f"a number of tokens, at least {fewest} with kv_policy {policy.name} and pages of "
            f"{page_size} tokens"
        )
        raise ValueError(f"kv_budget: expected {what}, got {budget!r}")
    return int(share * budget) // page_size


def check_served(policy: Policy, of_engine: Policy | None) -> None:
    """Raises: ValueError if an engine made for another policy does not measure or store what this
    one needs.
    """
    observes, focused = (
        (0, policy.focused) if of_engine is None else (of_engine.observes, of_engine.focused)
    )
    if of_engine is not None and of_engine.reads_some and policy != of_engine:
        raise ValueError(
            f"kv_policy: {of_engine.name} is the engine's for all requests, got {policy.name}"
        )
    wants = ["part of the pages to be read"] if policy.reads_some and policy != of_engine else []
    if policy.observes != 0 and (observes == 0 or policy.focused != focused):
        wants.append("attention to be observed so")
    if policy.needs_norms and (of_engine is None or not of_engine.needs_norms):
        wants.append("pages to be measured")
    if policy.low and (of_engine is None or policy.low != of_engine.low):
        wants.append(f"a pool of pages in {policy.low}")
    if wants:
        made = "full" if of_engine is None else of_engine.name
        what = (
            f"{policy.name} needs {' and '.join(wants)}, which an engine with kv_policy {made} "
            f"does not have"
        )
        raise ValueError(f"kv_policy: {what}: give it to LLM")


def protecting(retention: Retention, spans: Any, length: int) -> Retention:
    """With pages that stay: those of these (begin, end) token positions, within a prompt of so
    many.

    Raises: ValueError for anything else, or if they leave nothing to choose from.
    """
    listed = isinstance(spans, Sequence) and not isinstance(spans, (str, bytes))
    if not listed or not all(isinstance(one, (list, tuple)) and len(one) == 2 for one in spans):
        raise ValueError(
            f"kv_protect: expected a list of (begin, end) token positions, got {spans!r:.80}"
        )
    for begin, end in spans:
        if not (is_int(begin) and is_int(end) and 0 <= begin < end <= length):
            raise ValueError(
                f"kv_protect: expected 0 <= begin < end <= {length} (the prompt), got "
                f"{(begin, end)}"
            )
    whole = np.arange(-(-length // retention.page_size)) * retention.page_size
    in_spans = [(whole < end) & (whole + retention.page_size > begin) for begin, end in spans]
    num_protected = 1 + retention.recent + int(np.any(in_spans, axis=0)[1:].sum()) if spans else 0
    most = retention.full_pages - retention.step
    if num_protected > most:
        what = f"at most {most} pages, the first and {retention.recent} recent ones included"
        raise ValueError(f"kv_protect: expected {what}, got {num_protected}")
    return replace(retention, protected=tuple((begin, end) for begin, end in spans))
