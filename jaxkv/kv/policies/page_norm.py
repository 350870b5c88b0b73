"""Pages whose values are large and whose keys are small."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxkv.kv.policies.base import Held, Room, keep_best


@dataclass(frozen=True, kw_only=True, slots=True)
class PageNorm:
    """By the length of a page's values over that of its keys, without asking attention.

    Source: PagedEviction, arXiv 2509.04377; that short keys draw attention: arXiv 2406.11430.
    """

    name: str = "page_norm"
    low: str | None = None
    observes: int | None = 0
    focused: bool = False
    needs_norms: bool = True
    reads_some: bool = False

    def select(self, held: Held, room: Room) -> np.ndarray:
        if held.key_norm_W is None or held.value_norm_W is None:
            raise ValueError("page_norm: expected the lengths of keys and values, got none")
        return keep_best(held.value_norm_W / np.maximum(held.key_norm_W, 1e-30), held, room)
