"""Beam search over one prompt: which sequences go on and which have ended. Host only, and without
the engine.

The algorithm is transformers' with early_stopping=False, the sums are float32 as there: every step
looks at the best (1 + number of end tokens) * width continuations of all beams, at least 2 * width.
Those among the first `width` that end compete for the result, by score = sum of log-probabilities /
tokens ** length_penalty; the first `width` that do not end go on. It is over when `width` have
ended and the best that goes on would not beat the worst of them now.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

NEVER = np.float32(-1e9)
"""What all beams but one begin with: they are copies of it, and would repeat its continuations."""


@dataclass(frozen=True, slots=True, eq=False)
class Beam:
    """Holds a sequence: one more token than `before` has (None: the prompt), the sum of the
    log-probabilities up to it, and the likeliest tokens at its place, token_K and their logprob_K.
    A search's beams share their beginnings.
    """

    before: Beam | None
    token: int
    cum_logprob: np.float32
    token_K: np.ndarray
    logprob_K: np.ndarray

    def path(self) -> list[Beam]:
        """Returns the beams that end in this one, itself included, from the first token on."""
        beam: Beam | None = self
        path = []
        while beam is not None:
            path.append(beam)
            beam = beam.before
        return path[::-1]


class BeamSearch:
    """Searches on, step by step. Mutable: `running` and `ended` beams, both best first, and whether
    it `is_over`. Lengths are in new tokens.

    `num_candidates` is how many of its likeliest tokens each beam must tell.
    """

    def __init__(
        self, width: int, *, max_new: int, eos_ids: Iterable[int], length_penalty: float
    ) -> None:
        self.eos_ids = frozenset(eos_ids)
        self.num_candidates = num_candidates(width, len(self.eos_ids))
        self.running: list[Beam | None] = [None] * width
        self.is_over = False
        self._max_new = max_new
        self._length_penalty = length_penalty
        self._num_new = 0
        self._sum_W = np.full(width, NEVER)
        self._sum_W[0] = 0
        self._ended: list[tuple[np.float32, Beam]] = []

    @property
    def width(self) -> int:
        return len(self.running)

    @property
    def ended(self) -> list[Beam]:
        return [beam for _, beam in self._ended]

    def advance(self, token_WK: np.ndarray, logprob_WK: np.ndarray) -> list[tuple[int, int]]:
        """Takes every running beam's likeliest tokens, best first, with their float32
        log-probabilities.

        Returns (index of the running beam that it continues, token) of each that runs from now on;
        none at the end.
        """
        if self.is_over:
            raise RuntimeError("this search is over")
        self._num_new += 1
        order_C, sum_C = self._best(logprob_WK)
        parent_C, token_C = order_C // token_WK.shape[1], token_WK.reshape(-1)[order_C]
        ends_C = np.isin(token_C, list(self.eos_ids)) | (self._num_new == self._max_new)

        def beam(c: int) -> Beam:
            parent = parent_C[c]
            return Beam(
                self.running[parent],
                int(token_C[c]),
                sum_C[c],
                token_WK[parent],
                logprob_WK[parent],
            )

        self._end([beam(c) for c in np.flatnonzero(ends_C[: self.width]).tolist()])
        going = np.flatnonzero(~ends_C)[: self.width].tolist()
        self.is_over = not going or not self._may_improve(sum_C[going[0]])
        if self.is_over:
            return []
        self.running, self._sum_W = [beam(c) for c in going], sum_C[going]
        return [(int(parent_C[c]), int(token_C[c])) for c in going]

    def _best(self, logprob_WK: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Finds which of all continuations (flat indices) are the best, and their sums. Ties: the
        first one.
        """
        sums = (logprob_WK + self._sum_W[:, None]).reshape(-1)
        order_C = np.argsort(-sums, kind="stable")[: self.num_candidates]
        return order_C, sums[order_C]

    def _end(self, beams: list[Beam]) -> None:
        scored = self._ended + [(self._score(beam.cum_logprob), beam) for beam in beams]
        self._ended = sorted(scored, key=lambda pair: -pair[0])[: self.width]

    def _may_improve(self, best_sum: np.float32) -> bool:
        return len(self._ended) < self.width or bool(self._score(best_sum) > self._ended[-1][0])

    def _score(self, cum_logprob: np.float32) -> np.float32:
        return cum_logprob / np.float32(self._num_new**self._length_penalty)


def num_candidates(width: int, num_eos: int) -> int:
    """Returns how many continuations are looked at so that `width` of them do not end: no beam has
    more than `num_eos` that do.
    """
    return max(2, 1 + num_eos) * width
