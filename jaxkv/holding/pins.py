"""Keeps the pages of sessions in the prefix cache longer than others."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from itertools import count

from jaxkv.holding.hold import Allocators


class Pins:
    """Knows which keys owners want kept, and for how long: as long as anybody has the owner. Any
    thread may add some; what comes of it is the next `change`.
    """

    def __init__(self) -> None:
        self._numbers = count()
        self._made: dict[int, Sequence[bytes]] = {}
        self._owned: set[int] = set()
        self._new: dict[int, Sequence[bytes]] = {}
        """Pins whose owners are there, and those of them to be made at the next change; then the
        others are ended.
        """

    def add(self, owner: object, keys: Sequence[bytes]) -> None:
        """Adds pages of these keys, each sequence's first ones first. Waits for nobody."""
        number = next(self._numbers)
        # Before the keys: an interrupt between both would leave a pin that nobody ends. Both take
        # back at once, as the next change may never come, and are C, where no interrupt comes.
        weakref.finalize(owner, self._owned.discard, number).atexit = False
        weakref.finalize(owner, self._new.pop, number, None).atexit = False
        self._owned.add(number)
        self._new[number] = keys

    def change(self, allocators: Allocators) -> None:
        """Pins what was added, and ends the pins whose owners have gone."""
        for number in list(self._new):
            # In one line, as an interrupt may come behind it. An owner that has just gone has none.
            keys = self._made[number] = self._new.pop(number, ())
            allocators.pin(keys)
        if len(self._made) != len(self._owned):
            for number in [one for one in self._made if one not in self._owned]:
                allocators.unpin(self._made.pop(number))

    def start_again(self, allocators: Allocators) -> None:
        """Pins all of it in allocators that know of none."""
        for keys in self._made.values():
            allocators.pin(keys)

    def check(self, allocators: Allocators) -> None:
        """Raises RuntimeError unless these keys are pinned, and no others."""
        allocators.check_pins(self._made.values())
