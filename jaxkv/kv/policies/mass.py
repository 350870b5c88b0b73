"""Pages that got the most attention: of all queries so far, of the last ones, or of those that look
for something.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxkv.kv.policies.base import Held, Policy, Room, keep_best


@dataclass(frozen=True, kw_only=True, slots=True)
class Mass(Policy):
    """Keeps pages by the softmax weights that they got, over all layers, heads and observed
    queries.

    As h2o_page all queries count, as snapkv_page the last ones before a decision, as entropy all of
    them, each query head the less the more evenly it spreads (1 - entropy / log keys): one that
    attends to everything says nothing about what matters. With a codec `low` the next best pages
    are demoted.

    Source: H2O, arXiv 2306.14048; SnapKV, arXiv 2404.14469.
    """

    observes: int | None = None

    def select(self, held: Held, room: Room) -> np.ndarray:
        return keep_best(held.mass_W, held, room)
