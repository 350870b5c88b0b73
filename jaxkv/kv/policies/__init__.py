"""Policies by name, and sparse attention (the `kv_policy` that people write)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jaxkv.kv.codecs import CODECS, PLAIN
from jaxkv.kv.policies.base import DEMOTE, DROP, KEEP, Held, Measure, Policy, Room, keep_best
from jaxkv.kv.policies.mass import Mass
from jaxkv.kv.policies.page_norm import PageNorm
from jaxkv.kv.policies.sparse import SparseAttention
from jaxkv.kv.policies.streaming import Streaming

FULL = "full"
"""Neither: everything is kept and read."""

SNAPKV_QUERIES = 32

POLICIES: dict[str, Policy] = {
    policy.name: policy
    for policy in (
        Streaming(),
        PageNorm(),
        Mass(name="h2o_page"),
        Mass(name="snapkv_page", observes=SNAPKV_QUERIES),
        Mass(name="entropy", focused=True, low="int4"),
    )
}
SPARSE: dict[str, SparseAttention] = {"quest": SparseAttention(name="quest")}
LOW = tuple(name for name in CODECS if name not in PLAIN)
"""Codecs that pages can be demoted to."""


def resolve(name: Any) -> Policy | SparseAttention | None:
    """Returns what a `kv_policy` stands for, None for "full". "name:codec" has what would go
    demoted to that codec first.

    Raises: ValueError for an unknown name or codec, listing the known ones.
    """
    given, _, codec = name.partition(":") if isinstance(name, str) else ("", "", "")
    if name == FULL:
        return None
    if given not in POLICIES and given not in SPARSE:
        known = ", ".join((*POLICIES, *SPARSE))
        raise ValueError(f"kv_policy: expected {FULL} or one of {known}, got {name!r}")
    if name == given:
        return POLICIES.get(given) or SPARSE[given]
    if given in SPARSE:
        raise ValueError(
            f"kv_policy {given}: expected no codec, since nothing is demoted, got {name!r}"
        )
    if codec not in LOW:
        raise ValueError(
            f"kv_policy: expected one of {', '.join(LOW)} after the colon, got {name!r}"
        )
    return replace(POLICIES[given], low=codec)


def get_policy(name: Any) -> Policy | None:
    """Returns the policy that says what stays; None where everything does.

    Raises: ValueError as `resolve`.
    """
    asked = resolve(name)
    return asked if isinstance(asked, Policy) else None


__all__ = [
    "DEMOTE",
    "DROP",
    "FULL",
    "KEEP",
    "POLICIES",
    "Held",
    "Measure",
    "Policy",
    "Room",
    "SparseAttention",
    "get_policy",
    "keep_best",
    "resolve",
]
