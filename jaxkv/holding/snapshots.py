"""Keeps copies of recurrent states beside pages of the prefix index: what comes after a page goes
on from the state that its last token left.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable

SNAPSHOT_LEN = 1024
"""Tokens of a long prompt between two snapshots, at least."""


class Snapshots:
    """Hands out the slots of snapshots, each to a listed page. Mutable, host only.

    Where all are taken, the one that was not used for the longest time goes; with a page that
    leaves the index its snapshot does.
    """

    def __init__(self, slots: Iterable[int] = ()) -> None:
        self._free = sorted(slots, reverse=True)
        self.num_slots = len(self._free)
        self._slot_of: OrderedDict[int, int] = OrderedDict()

    def __contains__(self, page: int) -> bool:
        return page in self._slot_of

    def use(self, page: int) -> int:
        """Returns the slot of a page that has a snapshot."""
        self._slot_of.move_to_end(page)
        return self._slot_of[page]

    def take(self, page: int) -> int:
        """Returns a slot for the snapshot of a page that has none, which has it from now on."""
        slot = self._free.pop() if self._free else self._slot_of.popitem(last=False)[1]
        self._slot_of[page] = slot
        return slot

    def drop(self, page: int) -> None:
        """Frees the slot of a page, if it has one."""
        if (slot := self._slot_of.pop(page, None)) is not None:
            self._free.append(slot)

    def clear(self) -> None:
        self._free += self._slot_of.values()
        self._slot_of.clear()

    def goals(self, prompt_len: int, page_size: int) -> tuple[int, ...]:
        """Returns after how many tokens of a prompt its state is to be kept: where its last full
        page ends that others can go on from, and every so many pages before, of which one prompt
        takes half of the slots at most.
        """
        last = (prompt_len - 1) // page_size * page_size
        if not self.num_slots or not last:
            return ()
        spacing = max(SNAPSHOT_LEN, 2 * prompt_len // self.num_slots)
        spacing = -(-spacing // page_size) * page_size
        return (*range(spacing, last, spacing), last)

    def check(self, listed: Collection[int]) -> None:
        """Raises RuntimeError if a slot is lost or taken twice, or its page is not listed."""
        slots = [*self._free, *self._slot_of.values()]
        if len(slots) != self.num_slots or len(set(slots)) != len(slots):
            raise RuntimeError(f"slots of snapshots: {slots}, expected each of {self.num_slots}")
        if not self._slot_of.keys() <= set(listed):
            raise RuntimeError("a page that is not listed has a snapshot")
