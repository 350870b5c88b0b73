"""Policies by name (the `kv_policy` that people write)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jaxkv.kv.codecs import CODECS, PLAIN
from jaxkv.kv.policies.base import DEMOTE, DROP, KEEP, Held, Policy, Room, keep_best
from jaxkv.kv.policies.mass import Mass
from jaxkv.kv.policies.page_norm import PageNorm
from jaxkv.kv.policies.quest import Quest
from jaxkv.kv.policies.streaming import Streaming

FULL = "full"
"""No policy: everything is kept."""

SNAPKV_QUERIES = 32

POLICIES: dict[str, Any] = {
    policy.name: policy
    for policy in (
        Streaming(),
        PageNorm(),
        Mass(name="h2o_page"),
        Mass(name="snapkv_page", observes=SNAPKV_QUERIES),
        Mass(name="entropy", focused=True, low="int4"),
        Quest(),
    )
}
LOW = tuple(name for name in CODECS if name not in PLAIN)
"""Codecs that pages can be demoted to."""


def get_policy(name: Any) -> Policy | None:
    """The policy called `name`, None for "full". "name:codec" has what would go demoted to that
    codec first.

    Raises: ValueError for an unknown name or codec, listing the known ones.
    """
    given, _, codec = name.partition(":") if isinstance(name, str) else ("", "", "")
    if name == FULL:
        return None
    if given not in POLICIES:
        raise ValueError(
            f"kv_policy: expected {FULL} or one of {', '.join(POLICIES)}, got {name!r}"
        )
    if not codec and name == given:
        return POLICIES[given]
    if POLICIES[given].reads_some:
        raise ValueError(
            f"kv_policy {given}: expected no codec, since nothing is demoted, got {name!r}"
        )
    if codec not in LOW:
        raise ValueError(
            f"kv_policy: expected one of {', '.join(LOW)} after the colon, got {name!r}"
        )
    return replace(POLICIES[given], low=codec)


def asks_backend(policy: Policy | None) -> bool:
    """Whether it wants more of a backend than tables with gaps: sums, lengths, a second pool, part
    of the pages.
    """
    if policy is None:
        return False
    return policy.low is not None or policy.needs_norms or policy.observes != 0 or policy.reads_some


__all__ = [
    "DEMOTE",
    "DROP",
    "FULL",
    "KEEP",
    "POLICIES",
    "Held",
    "Policy",
    "Room",
    "asks_backend",
    "get_policy",
    "keep_best",
]
