"""Reference counts of pages: every handle keeps its own tokens whatever happens to others, and nothing leaks."""

import random
from dataclasses import dataclass, field

import pytest

from jaxkv.engine.allocator import KVHandle, PageAllocator
from jaxkv.errors import CapacityError

PAGE = 4


def filled(allocator: PageAllocator, length: int, room: int | None = None) -> KVHandle:
    """A handle with `length` tokens stored, and pages for `room`."""
    return allocator.advance(allocator.reserve(KVHandle(), room or length), length)


def state(allocator: PageAllocator) -> tuple[list[int], list[int]]:
    return list(allocator._references), list(allocator._empty)


# --- one operation at a time ------------------------------------------------------------------------------------------


def test_a_reservation_takes_whole_pages_and_leaves_the_length():
    allocator = PageAllocator(8, PAGE)
    handle = allocator.reserve(KVHandle(), 5)
    assert (len(handle.pages), handle.length) == (2, 0)
    assert (allocator.num_used, allocator.num_free) == (2, 6)
    assert allocator.reserve(handle, 8) is handle
    longer = allocator.reserve(handle, 9)
    assert longer.pages[:2] == handle.pages
    assert len(set(longer.pages)) == 3
    allocator.check([longer])


def test_pages_for_rounds_up():
    allocator = PageAllocator(1, PAGE)
    assert [allocator.pages_for(n) for n in (0, 1, 3, 4, 5, 8, 9)] == [0, 1, 1, 1, 2, 2, 3]


def test_advance_stays_within_the_reserved_pages_and_never_goes_back():
    allocator = PageAllocator(8, PAGE)
    handle = filled(allocator, 3, room=5)
    assert allocator.advance(handle, 8).length == 8
    for length in (2, 9, -1):
        with pytest.raises(ValueError, match=f"a length of 3 to 8 tokens, got {length}"):
            allocator.advance(handle, length)
    allocator.check([handle])


@pytest.mark.parametrize("length", [0, 1, 4, 5, 8, 11])
def test_a_fork_shares_full_pages_and_copies_only_the_partial_tail(length):
    allocator = PageAllocator(8, PAGE)
    handle = filled(allocator, length, room=12)
    fork, copy = allocator.fork(handle)
    full = length // PAGE
    assert fork.length == length
    assert fork.pages[:full] == handle.pages[:full]
    if length % PAGE:
        assert copy == (handle.pages[full], fork.pages[full])
        assert fork.pages[full] not in handle.pages
    else:
        assert copy is None
        assert len(fork.pages) == full
    assert allocator.num_used == 3 + bool(length % PAGE)
    allocator.check([handle, fork])
    allocator.release(handle)
    assert allocator.num_used == len(fork.pages)
    allocator.check([fork])
    allocator.release(fork)
    assert allocator.num_free == 8
    allocator.check([])


@pytest.mark.parametrize("length", [0, 1, 3, 4, 5, 9])
def test_rewind_keeps_the_pages_of_the_kept_tokens_only(length):
    allocator = PageAllocator(8, PAGE)
    handle = filled(allocator, 9, room=20)
    short = allocator.rewind(handle, length)
    assert (short.length, short.pages) == (length, handle.pages[: allocator.pages_for(length)])
    allocator.check([short])
    for wrong in (-1, length + 1):
        with pytest.raises(ValueError, match=f"a length of 0 to {length} tokens, got {wrong}"):
            allocator.rewind(short, wrong)


def test_a_rewound_fork_leaves_the_shared_pages_to_the_other():
    allocator = PageAllocator(8, PAGE)
    handle = filled(allocator, 8)
    fork, _ = allocator.fork(handle)
    fork = allocator.rewind(fork, 0)
    allocator.check([handle, fork])
    assert allocator.num_used == 2


def test_the_first_pages_released_are_handed_out_first_again():
    allocator = PageAllocator(8, PAGE)
    handle = filled(allocator, 12)
    allocator.release(handle)
    assert allocator.reserve(KVHandle(), 12).pages == handle.pages


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
        allocator.reserve(handle, 17)
    assert state(allocator) == before
    other = filled(allocator, 8)
    before = state(allocator)
    with pytest.raises(CapacityError, match="1 pages of 4 tokens needed, 0 free"):
        allocator.fork(handle)
    assert state(allocator) == before
    allocator.check([handle, other])
    fork, copy = allocator.fork(other)  # full pages need no new one
    assert copy is None
    allocator.check([handle, other, fork])


# --- check sees what is wrong -----------------------------------------------------------------------------------------


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
    handles.append(allocator.reserve(handles[0], 16))


CORRUPTIONS = [lose_a_reference, gain_a_reference, take_a_free_page, lose_a_free_page, free_a_used_page,
               free_a_page_twice, forget_a_handle, keep_a_dead_handle, use_a_handle_twice]  # fmt: skip


@pytest.mark.parametrize("corrupt", CORRUPTIONS)
def test_check_sees_a_corruption(corrupt):
    allocator = PageAllocator(8, PAGE)
    handles = [filled(allocator, 6)]
    handles.append(allocator.fork(handles[0])[0])
    allocator.check(handles)
    corrupt(allocator, handles)
    with pytest.raises(RuntimeError):
        allocator.check(handles)


# --- many operations against a naive model ----------------------------------------------------------------------------


@dataclass
class Naive:
    """What every handle must read back: its own list of tokens. The memory stands for the device's pages."""

    allocator: PageAllocator
    rng: random.Random
    memory: dict[tuple[int, int], int] = field(default_factory=dict)
    live: list[tuple[KVHandle, list[int]]] = field(default_factory=list)
    num_refused: int = 0

    def step(self) -> None:
        operation = self.rng.choice([self.start, self.grow, self.grow, self.grow, self.fork, self.rewind, self.release])
        before = state(self.allocator)
        try:
            operation()
        except CapacityError:
            self.num_refused += 1
            assert state(self.allocator) == before
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
        if self.tail_is_shared(handle):
            return
        handle = self.allocator.reserve(handle, handle.length + self.rng.randrange(0, 14))
        room = len(handle.pages) * PAGE
        new = [self.rng.getrandbits(30) for _ in range(self.rng.randint(0, room - handle.length))]
        for position, token in enumerate(new, start=handle.length):
            self.memory[handle.pages[position // PAGE], position % PAGE] = token
        self.live[i] = self.allocator.advance(handle, handle.length + len(new)), tokens + new

    def tail_is_shared(self, handle: KVHandle) -> bool:
        """A handle rewound into a shared page may be read, forked and released; to be written it must be forked."""
        written = handle.pages[handle.length // PAGE :]
        return any(page in other.pages for page in written for other, _ in self.live if other is not handle)

    def fork(self) -> None:
        if not self.live:
            return
        handle, tokens = self.live[self.pick()]
        fork, copy = self.allocator.fork(handle)
        if copy is not None:
            source, target = copy
            self.memory |= {(target, slot): self.memory.get((source, slot), -1) for slot in range(PAGE)}
        self.live.append((fork, list(tokens)))

    def rewind(self) -> None:
        if not self.live:
            return
        i = self.pick()
        handle, tokens = self.live[i]
        length = self.rng.randint(0, handle.length)
        self.live[i] = self.allocator.rewind(handle, length), tokens[:length]

    def release(self) -> None:
        if self.live:
            handle, _ = self.live.pop(self.pick())
            self.allocator.release(handle)

    def check(self) -> None:
        self.allocator.check(handle for handle, _ in self.live)
        used = {page for handle, _ in self.live for page in handle.pages}
        assert self.allocator.num_used == len(used) == self.allocator.num_pages - self.allocator.num_free
        self.memory = {slot: token for slot, token in self.memory.items() if slot[0] in used}
        for handle, tokens in self.live:
            assert handle.length == len(tokens) <= len(handle.pages) * PAGE
            assert [self.memory[handle.pages[i // PAGE], i % PAGE] for i in range(handle.length)] == tokens


def test_random_operations_keep_every_sequence_whole_and_lose_no_page():
    naive = Naive(PageAllocator(12, PAGE), random.Random(0))
    for _ in range(20_000):
        naive.step()
    assert naive.num_refused > 500  # the pool was full often enough to mean something
    while naive.live:
        naive.release()
    naive.check()
    assert naive.allocator.num_free == 12
