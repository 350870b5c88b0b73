"""Bounds the cache of one sequence, and counts the pages that a budget allows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxkv.config import is_int
from jaxkv.kv.policies import FULL, Policy, SparseAttention

FULL_SHARE = 0.5
"""Part of a budget that pages in full precision take where a policy demotes others."""

FEWEST_PAGES = 4
"""In full precision: the first of a sequence, a recent one, one to choose, and one that goes."""

NEVER = 1 << 62
"""A number of tokens that no sequence reaches."""

Spans = tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Retention:
    """Says how one request's cache is bounded. When `full_pages` pages are full, `policy` says
    which of them stay, some `step` fewer; at most `low_pages` are held demoted. `protected`: token
    positions, begin and end of each span.
    """

    policy: Policy
    page_size: int
    full_pages: int
    low_pages: int
    protected: Spans = ()

    @property
    def limit(self) -> int:
        """Counts the tokens that are held in full precision when the policy is asked."""
        return self.full_pages * self.page_size

    @property
    def step(self) -> int:
        """Counts the pages that have gone or been demoted after it was: an eighth, so that the
        chunks of a long prompt, which end where it is asked, are not too short.
        """
        return max(1, self.full_pages // 8)

    def low_pages_for(self, num_tokens: int) -> int:
        """Counts the demoted pages that a sequence of so many tokens may have."""
        num_asked = max(0, num_tokens - self.limit + self.step * self.page_size) // (
            self.step * self.page_size
        )
        return min(self.low_pages, num_asked * self.step)

    @property
    def recent(self) -> int:
        """Counts the last pages, which stay."""
        return max(1, self.full_pages // 4)

    @property
    def needs_results(self) -> bool:
        """Tells whether the policy decides by what steps have observed, or what was measured behind
        them.
        """
        return self.policy.observes != 0 or self.policy.measure is not None

    @property
    def cached_len(self) -> int:
        """Counts the first tokens, which may come out of the prefix cache: nothing that the policy
        decides by is missed, and something is left to compute before it is asked.
        """
        observes = self.policy.observes
        return 0 if observes is None else max(0, self.limit - max(observes, self.page_size))

    def is_protected(self, first_W: np.ndarray) -> np.ndarray:
        """Tells which full pages no policy touches, of those with these first positions, in order:
        the first, the last `recent` and those with a protected token. [W] bool.
        """
        protected_W = np.zeros(len(first_W), bool)
        for begin, end in self.protected:
            protected_W |= (first_W < end) & (first_W + self.page_size > begin)
        protected_W[0] = True
        protected_W[len(first_W) - self.recent :] = True
        return protected_W

    def since(self, evict_len: int) -> int:
        """Returns the position from which on queries are observed before the policy is asked at
        that length.
        """
        observes = self.policy.observes
        return 0 if observes is None else max(0, evict_len - observes)


def full_pages(asked: Policy | SparseAttention, budget: Any, *, page_size: int) -> int:
    """Returns how many pages in full precision a budget allows: so many tokens' bytes in full
    precision, or half of them where a policy demotes pages.

    Raises: ValueError for a budget that is too small.
    """
    share = FULL_SHARE if isinstance(asked, Policy) and asked.low else 1.0
    fewest = int(FEWEST_PAGES * page_size / share)
    if not is_int(budget) or budget < fewest:
        what = (
            f"a number of tokens, at least {fewest} with kv_policy {asked.name} and pages of "
            f"{page_size} tokens"
        )
        raise ValueError(f"kv_budget: expected {what}, got {budget!r}")
    return int(share * budget) // page_size


def check_served(
    asked: Policy | SparseAttention | None, of_engine: Policy | SparseAttention | None
) -> None:
    """Raises: ValueError if an engine made for another `kv_policy` does not measure or store what
    the one that is asked for needs.
    """
    if asked == of_engine:
        return
    if isinstance(of_engine, SparseAttention):
        name = FULL if asked is None else asked.name
        raise ValueError(
            f"kv_policy: {of_engine.name} is the engine's for all requests, got {name}"
        )
    if asked is None:
        return
    if isinstance(asked, SparseAttention):
        wants = ["part of the pages to be read"]
    else:
        wants = _missing(asked, of_engine)
    if wants:
        made = FULL if of_engine is None else of_engine.name
        what = (
            f"{asked.name} needs {' and '.join(wants)}, which an engine with kv_policy {made} "
            f"does not have"
        )
        raise ValueError(f"kv_policy: {what}: give it to LLM")


def _missing(policy: Policy, of_engine: Policy | None) -> list[str]:
    """Returns in words what a policy needs and the engine does not have."""
    if of_engine is None:
        lacking = (policy.observes != 0, policy.measure is not None, policy.low is not None)
    else:
        observes_so = of_engine.observes != 0 and policy.focused == of_engine.focused
        lacking = (
            policy.observes != 0 and not observes_so,
            policy.measure not in (None, of_engine.measure),
            policy.low not in (None, of_engine.low),
        )
    needs = (
        "attention to be observed so",
        "pages to be measured",
        f"a pool of pages in {policy.low}",
    )
    return [need for need, is_lacking in zip(needs, lacking, strict=True) if is_lacking]


def protecting(retention: Retention, spans: Any, length: int) -> Retention:
    """Returns it with pages that stay: those of these (begin, end) token positions, within a prompt
    of so many.

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
