"""Decides which adapters are on the device, each in a slot of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from jaxkv.weights.adapters import Adapter


class AdapterSlots:
    """Keeps adapters in slots for as long as running requests have them, and from then on until
    another one needs the slot: that which was used least lately goes. Host only.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._slot_of: dict[bytes, int] = {}
        """By digest, that used least lately first."""
        self._num_users: Counter[bytes] = Counter()
        self._loads: dict[int, Adapter] = {}

    def slot_of(self, adapter: Adapter | None) -> int:
        """Returns where a running request's adapter is; past the last slot for none."""
        return self.count if adapter is None else self._slot_of[adapter.digest]

    def has_room(self, adapter: Adapter | None) -> bool:
        """Tells whether a request with this adapter may run now."""
        if adapter is None or adapter.digest in self._slot_of:
            return True
        return len(self._slot_of) < self.count or self._idle() is not None

    def take(self, adapter: Adapter | None) -> None:
        """Holds an adapter for one more running request. Ask `has_room` before."""
        if adapter is None:
            return
        slot = self._slot_of.pop(adapter.digest, None)
        if slot is None:
            slot = self._free_slot()
            self._loads[slot] = adapter
        self._slot_of[adapter.digest] = slot
        self._num_users[adapter.digest] += 1

    def give_back(self, adapter: Adapter | None) -> None:
        """Ends what `take` began."""
        if adapter is not None:
            self._num_users[adapter.digest] -= 1
            if not self._num_users[adapter.digest]:
                del self._num_users[adapter.digest]

    def take_loads(self) -> list[tuple[int, Adapter]]:
        """Returns what is to be written to which slot before the next step."""
        loads = list(self._loads.items())
        self._loads.clear()
        return loads

    def start_again(self) -> None:
        """Forgets everything: no slot holds anything."""
        for state in (self._slot_of, self._num_users, self._loads):
            state.clear()

    def _idle(self) -> bytes | None:
        return next((one for one in self._slot_of if not self._num_users[one]), None)

    def _free_slot(self) -> int:
        if len(self._slot_of) < self.count:
            return min(set(range(self.count)) - set(self._slot_of.values()))
        idle = self._idle()
        if idle is None:
            raise RuntimeError(f"all {self.count} adapters on the device are in use")
        return self._slot_of.pop(idle)

    def check(self, running: Iterable[Adapter | None]) -> None:
        """Raises RuntimeError unless these, of running requests, are what is held."""
        users = Counter(adapter.digest for adapter in running if adapter is not None)
        if self._num_users != users or not self._slot_of.keys() >= users.keys():
            raise RuntimeError("adapters that are held are not those of running requests")
        slots = sorted(self._slot_of.values())
        if len({*slots}) != len(slots) or not {*slots} <= {*range(self.count)}:
            raise RuntimeError(f"adapters are in slots {slots} of {self.count}")
