"""Decides whether pages on a disk are loaded or computed again, by what both have taken so far."""

from __future__ import annotations

from dataclasses import dataclass, field

LASTING_S = 10.0
"""Measured seconds after which what was measured before counts half, then a quarter, ..."""
TRIED_AGAIN = 32
"""One of so many hits that it does not pay to load is loaded: that may have changed."""


@dataclass(slots=True)
class Pace:
    """Says how long one of something takes, by the last ones."""

    num: float = 0.0
    seconds: float = 0.0

    def add(self, num: int, seconds: float) -> None:
        if self.seconds > LASTING_S:
            self.num, self.seconds = self.num / 2, self.seconds / 2
        self.num, self.seconds = self.num + num, self.seconds + seconds

    @property
    def each_s(self) -> float:
        return self.seconds / self.num if self.num else 0.0


@dataclass(slots=True)
class Costs:
    """Compares loading with computing. Until both were measured it loads.

    read, copied: pages from the disk, and to the device. computed: tokens of steps with prompts,
    padding included, which takes the same time. step_s: what the last step or loop took, which a
    request that waits for its pages lets go by if others run.
    """

    read: Pace = field(default_factory=Pace)
    copied: Pace = field(default_factory=Pace)
    computed: Pace = field(default_factory=Pace)
    step_s: float = 0.0
    num_refused: int = 0

    def pays(self, num_pages: int, num_tokens: int, *, is_busy: bool) -> bool:
        """Tells whether so many tokens are there sooner if these pages of them are loaded;
        `is_busy`: others run meanwhile.
        """
        if not (self.read.num and self.computed.num):
            return True
        load_s = num_pages * (self.read.each_s + self.copied.each_s)
        load_s += self.step_s if is_busy else 0.0
        if load_s <= num_tokens * self.computed.each_s:
            return True
        self.num_refused += 1
        return self.num_refused % TRIED_AGAIN == 0

    def stepped(self, num_tokens: int, seconds: float) -> None:
        """Notes a step of so many tokens with prompts among them, or (0) a decode loop."""
        self.step_s = seconds
        if num_tokens:
            self.computed.add(num_tokens, seconds)
