"""The first page and the latest: what comes in between is forgotten."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxkv.kv.policies.base import Held, Policy, Room, keep_best


@dataclass(frozen=True, kw_only=True, slots=True)
class Streaming(Policy):
    """Keeps attention sinks and a window. With a codec `low` what leaves the window is demoted
    before it is forgotten: recent tokens are where a codec's error counts most (docs/kv-lab.md).

    Source: StreamingLLM, arXiv 2309.17453; the window in full precision as in KIVI, arXiv
    2402.02750.
    """

    name: str = "streaming"

    def select(self, held: Held, room: Room) -> np.ndarray:
        return keep_best(held.first_W.astype(np.float64), held, room)
