"""Nothing goes: a decoding query reads only the pages that could matter to it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxkv.kv.policies.base import KEEP, Held, Room


@dataclass(frozen=True, kw_only=True, slots=True)
class Quest:
    """Of each row as many pages as the budget has, chosen anew for every query and KV head
    (`ops.attention.select`).

    Source: Quest, arXiv 2406.10774.
    """

    name: str = "quest"
    low: str | None = None
    observes: int | None = 0
    focused: bool = False
    needs_norms: bool = False
    reads_some: bool = True

    def select(self, held: Held, room: Room) -> np.ndarray:
        return np.full(len(held.first_W), KEEP, np.int8)
