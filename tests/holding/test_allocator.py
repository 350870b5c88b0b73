"""Reference counts of pages: every handle keeps its own tokens whatever happens to others, and
nothing leaks.
"""

import random
from dataclasses import dataclass, field

import pytest

from handles import filled, reserved
from jaxkv.errors import CapacityError
from jaxkv.holding.allocator import KVHandle, PageAllocator

PAGE = 4


def state(allocator: PageAllocator) -> tuple[list[int], list[int]]:
    return list(allocator._references), list(allocator._empty)


# --- one operation at a time
# ------------------------------------------------------------------------------------------


def test_pages_for_rounds_up():
    allocator = PageAllocator(1, PAGE)
    assert [allocator.pages_for(n) for n in (0, 1, 3, 4, 5, 8, 9)] == [0, 1, 1, 1, 2, 2, 3]


@pytest.mark.parametrize("length", [0, 1, 4, 5, 8, 11])
def test_a_fork_shares_all_pages_and_the_first_that_writes_gets_its_own_partial_tail(length):
    allocator = PageAllocator(8, PAGE)
    handle = filled(allocator, length, room=12)
    fork = allocator.fork(handle)
    full, partial = length // PAGE, length % PAGE > 0
    assert fork == KVHandle(handle.pages[: full + partial], length)
    assert allocator.num_used == 3
    allocator.check([handle, fork])
    own, copy = allocator.own_tail(fork)
    assert allocator.num_used == 3 + partial
    if partial:
        assert copy == (handle.pages[full], own.pages[full])
        assert own.pages[full] not in handle.pages
    assert (own.pages[:full], own.length) == (handle.pages[:full], length)
    for one in (own, handle):  # neither is shared now
        assert allocator.own_tail(one) == (one, None)
    allocator.check([own, handle])
    allocator.release(handle)
    assert allocator.num_used == len(own.pages)
    allocator.check([own])
    allocator.release(own)
    assert allocator.num_free == 8
    allocator.check([])


def test_the_last_holder_of_a_tail_keeps_it():
    allocator = PageAllocator(8, PAGE)
    first = filled(allocator, 5)
    second, third = allocator.fork(first), allocator.fork(first)
    copies = []
    for handle in (first, second, third):
        own, copy = allocator.own_tail(handle)
        copies.append(copy)
        allocator.check([own, *[first, second, third][len(copies) :]])
        allocator.release(own)
    assert [copy and copy[0] for copy in copies] == [first.pages[1], first.pages[1], None]


def test_the_first_pages_released_are_handed_out_first_again():
    allocator = PageAllocator(8, PAGE)
    handle = filled(allocator, 12)
    allocator.release(handle)
    assert tuple(allocator.take(3)) == handle.pages


@pytest.mark.parametrize("forked", [False, True])
def test_a_handle_released_twice_raises(forked):
    allocator = PageAllocator(8, PAGE)
    handle = filled(allocator, 8)
    if forked:
        allocator.fork(handle)
        allocator.release(handle)
    allocator.release(handle)
    with pytest.raises(RuntimeError, match="released more often than it was taken"):
        allocator.release(handle)


def test_exhaustion_says_needed_and_free_and_changes_nothing():
    allocator = PageAllocator(4, PAGE)
    handle = filled(allocator, 5)
    before = state(allocator)
    with pytest.raises(CapacityError, match="3 pages of 4 tokens needed, 2 free"):
        reserved(allocator, 17, handle)
    assert state(allocator) == before
    other = filled(allocator, 8)
    before = state(allocator)
    fork = allocator.fork(handle)
    shared = state(allocator)
    with pytest.raises(CapacityError, match="1 pages of 4 tokens needed, 0 free"):
        allocator.own_tail(fork)
    assert state(allocator) == shared
    allocator.check([handle, other, fork])
    allocator.release(fork)
    assert state(allocator) == before
    fork, copy = allocator.own_tail(allocator.fork(other))  # full pages need no new one
    assert copy is None
    allocator.check([handle, other, fork])


def test_a_handle_is_a_value():
    allocator = PageAllocator(8, PAGE)
    handle = filled(allocator, 6)
    assert handle == KVHandle(handle.pages, 6) != KVHandle(handle.pages, 5)
    assert {handle: 1}[KVHandle(handle.pages, 6)] == 1
    for name in ("pages", "length"):
        with pytest.raises(AttributeError):
            setattr(handle, name, ())


def test_pages_for_several_handles_are_taken_together_or_not_at_all():
    allocator = PageAllocator(8, PAGE)
    one, two = filled(allocator, 3), filled(allocator, 4)
    new = allocator.take(5)
    longer = [KVHandle(one.pages + tuple(new[:2]), 3), KVHandle(two.pages + tuple(new[2:]), 4)]
    allocator.check(longer)
    before = state(allocator)
    with pytest.raises(CapacityError, match="2 pages of 4 tokens needed, 1 free"):
        allocator.take(2)
    assert state(allocator) == before


# --- check sees what is wrong
# -----------------------------------------------------------------------------------------


def lose_a_reference(allocator, handles):
    allocator._references[handles[0].pages[0]] -= 1


def gain_a_reference(allocator, handles):
    allocator._references[handles[0].pages[0]] += 1


def take_a_free_page(allocator, handles):
    allocator._references[allocator._empty[0]] = 1


def lose_a_free_page(allocator, handles):
    allocator._empty.pop()


def free_a_used_page(allocator, handles):
    allocator._empty[0] = handles[0].pages[0]


def free_a_page_twice(allocator, handles):
    allocator._empty[0] = allocator._empty[1]


def forget_a_handle(allocator, handles):
    handles.pop()


def keep_a_dead_handle(allocator, handles):
    allocator.release(handles[0])


def use_a_handle_twice(allocator, handles):
    handles.append(reserved(allocator, 16, handles[0]))


CORRUPTIONS = [
    lose_a_reference,
    gain_a_reference,
    take_a_free_page,
    lose_a_free_page,
    free_a_used_page,
    free_a_page_twice,
    forget_a_handle,
    keep_a_dead_handle,
    use_a_handle_twice,
]


@pytest.mark.parametrize("corrupt", CORRUPTIONS)
def test_check_sees_a_corruption(corrupt):
    allocator = PageAllocator(8, PAGE)
    handles = [filled(allocator, 6)]
    handles.append(allocator.own_tail(allocator.fork(handles[0]))[0])
    allocator.check(handles)
    corrupt(allocator, handles)
    with pytest.raises(RuntimeError):
        allocator.check(handles)


# --- many operations against a naive model
# ----------------------------------------------------------------------------


@dataclass
class Naive:
    """What every handle must read back: its own list of tokens. The memory stands for the device's
    pages.
    """

    allocator: PageAllocator
    rng: random.Random
    memory: dict[tuple[int, int], int] = field(default_factory=dict)
    live: list[tuple[KVHandle, list[int]]] = field(default_factory=list)
    num_refused: int = 0
    num_copied: int = 0

    def step(self) -> None:
        operation = self.rng.choice(
            [self.start, self.grow, self.grow, self.grow, self.fork, self.cut, self.release]
        )
        self.before = state(self.allocator)
        try:
            operation()
        except CapacityError:
            self.num_refused += 1
            assert state(self.allocator) == self.before
            self.release()
        self.check()

    def pick(self) -> int:
        return self.rng.randrange(len(self.live))

    def start(self) -> None:
        self.live.append((KVHandle(), []))

    def grow(self) -> None:
        if not self.live:
            return
        i = self.pick()
        handle, tokens = self.live[i]
        total = handle.length + self.rng.randrange(0, 14)
        handle, copy = self.allocator.own_tail(handle)
        self.live[i], self.before = (handle, tokens), state(self.allocator)
        if copy is not None:
            source, target = copy
            self.memory |= {
                (target, slot): self.memory.get((source, slot), -1) for slot in range(PAGE)
            }
            self.num_copied += 1
        handle = reserved(self.allocator, total, handle)
        room = len(handle.pages) * PAGE
        new = [self.rng.getrandbits(30) for _ in range(self.rng.randint(0, room - handle.length))]
        for position, token in enumerate(new, start=handle.length):
            self.memory[handle.pages[position // PAGE], position % PAGE] = token
        self.live[i] = KVHandle(handle.pages, handle.length + len(new)), tokens + new

    def fork(self) -> None:
        if not self.live:
            return
        handle, tokens = self.live[self.pick()]
        self.live.append((self.allocator.fork(handle), list(tokens)))

    def cut(self) -> None:
        if not self.live:
            return
        i = self.pick()
        handle, tokens = self.live[i]
        length = self.rng.randint(0, handle.length)
        first = self.allocator.fork(KVHandle(handle.pages, length))
        self.allocator.release(handle)
        self.live[i] = first, tokens[:length]

    def release(self) -> None:
        if self.live:
            handle, _ = self.live.pop(self.pick())
            self.allocator.release(handle)

    def check(self) -> None:
        self.allocator.check(handle for handle, _ in self.live)
        used = {page for handle, _ in self.live for page in handle.pages}
        assert (
            self.allocator.num_used
            == len(used)
            == self.allocator.num_pages - self.allocator.num_free
        )
        self.memory = {slot: token for slot, token in self.memory.items() if slot[0] in used}
        for handle, tokens in self.live:
            assert handle.length == len(tokens) <= len(handle.pages) * PAGE
            assert [
                self.memory[handle.pages[i // PAGE], i % PAGE] for i in range(handle.length)
            ] == tokens


def test_random_operations_keep_every_sequence_whole_and_lose_no_page():
    naive = Naive(PageAllocator(12, PAGE), random.Random(0))
    for _ in range(20_000):
        naive.step()
    assert naive.num_refused > 500  # the pool was full often enough to mean something
    assert naive.num_copied > 300
    while naive.live:
        naive.release()
    naive.check()
    assert naive.allocator.num_free == 12
