"""Holds: every operation keeps tokens, pages and positions together, in each page table."""

from array import array
from dataclasses import fields, replace

import numpy as np
import pytest

from jaxkv.errors import CapacityError
from jaxkv.holding.allocator import KVHandle
from jaxkv.holding.hold import Allocators, Hold
from jaxkv.holding.prefix import PageChain
from jaxkv.holding.retention import Retention
from jaxkv.kv.policies import get_policy
from tiny import ENGINE

SIZE = ENGINE.block_size
TOKENS = array("i", range(100))


def allocators(**changes: object) -> Allocators:
    return Allocators(replace(ENGINE, **changes))


def begun(pages: Allocators, length: int = 0, *, room: int = 0, prompt_len: int = 100) -> Hold:
    """A hold with so many tokens stored, and pages for `room`."""
    hold = Hold(PageChain(b"root"), prompt_len)
    hold.begin(pages)
    pages.extend([(hold, max(length, room))])
    hold.advance(length)
    return hold


def bounded(pages: Allocators, length: int) -> Hold:
    """A hold under a policy that is asked at four pages."""
    policy = get_policy("entropy:int8")
    retention = Retention(policy=policy, page_size=SIZE, full_pages=4, low_pages=2)
    hold = Hold(PageChain(b"root"), 0, retention)
    hold.begin(pages)
    pages.extend([(hold, length)])
    hold.advance(length)
    return hold


def test_an_empty_hold_has_nothing_and_a_released_one_gave_all_back():
    pages = allocators()
    hold = Hold(PageChain(b"root"), 9)
    assert hold.is_empty
    assert hold.handle() == KVHandle()
    hold.begin(pages)
    pages.extend([(hold, 20)])
    hold.advance(17)
    pages.check([hold])
    assert (hold.room_len, hold.handle().length, pages.pages.num_used) == (24, 17, 3)
    hold.release()
    assert hold.is_empty
    fresh = Hold(hold.chain, 9)
    assert all(getattr(hold, one.name) == getattr(fresh, one.name) for one in fields(Hold))
    pages.check([])


def test_holds_that_are_extended_together_get_pages_or_none_of_them_does():
    pages = allocators(num_pages=4)
    one, two = begun(pages, 8), begun(pages, 3)
    pages.extend([(one, 9), (two, 9)])
    assert (one.room_len, two.room_len) == (16, 16)
    pages.check([one, two])
    with pytest.raises(CapacityError):
        pages.extend([(one, 17), (two, 17)])
    with pytest.raises(CapacityError):
        pages.extend([(one, 17)])
    assert (one.room_len, two.room_len) == (16, 16)
    pages.check([one, two])


@pytest.mark.parametrize("count", [-1, 8])
def test_advance_stays_within_the_reserved_pages(count):
    hold = begun(allocators(), 9)
    with pytest.raises(ValueError, match="0 to 7 more tokens"):
        hold.advance(count)


def test_a_fork_shares_pages_and_nothing_that_can_be_changed():
    pages = Allocators(replace(ENGINE, row_pages=4, low_row_pages=4))
    hold = bounded(pages, 32)
    hold.kept.low, hold.kept.low_first = pages.low.take(2), [8, 16]
    hold.trim({1, 2})
    pages.extend([(hold, 38)])
    hold.advance(5)
    hold.chain.page(0, TOKENS, SIZE)
    twin = hold.fork()
    pages.check([hold, twin])
    assert twin.handle() == KVHandle(hold.handle().pages, 21)
    before = twin.handle(), list(twin.parts[0].first), list(twin.kept.low), len(twin.chain.keys)
    hold.parts[0].first[0] = 99
    hold.chain.page(1, TOKENS, SIZE)
    hold.kept.mass += 1
    hold.kept.low_mass += 1
    assert not twin.kept.mass.any()
    assert not twin.kept.low_mass.any()
    hold.release()
    after = twin.handle(), list(twin.parts[0].first), list(twin.kept.low), len(twin.chain.keys)
    assert before == after
    pages.check([twin])


def test_no_field_of_a_fork_is_forgotten():
    """All that is not made anew for a fork is what it was, be it added tomorrow."""
    hold = begun(allocators(), 19, room=40)
    hold.publish(TOKENS, 19)
    hold.is_listed = False
    twin = hold.fork()
    made = {"chain", "parts", "kept", "room_len", "bound_len"}
    for one in fields(Hold):
        if one.name not in made:
            assert getattr(twin, one.name) == getattr(hold, one.name), one.name
    assert (twin.room_len, twin.bound_len) == (24, 0)  # without what was only reserved


def test_whoever_writes_a_shared_tail_first_takes_a_copy():
    pages = allocators()
    hold = begun(pages, 13)
    twin = hold.fork()
    hold.bound_len = 16
    ((source, target),) = hold.own_tail()
    assert (source, target) == (twin.handle().pages[1], hold.handle().pages[1])
    assert hold.bound_len == 0
    assert twin.own_tail() == ()
    pages.check([hold, twin])


def test_what_goes_is_given_back_and_positions_say_what_stayed():
    pages = Allocators(replace(ENGINE, row_pages=4))
    hold = bounded(pages, 32)
    first, _, third, _ = hold.handle().pages
    hold.bound_len = 32
    hold.trim({1, 3})
    assert hold.handle() == KVHandle((first, third), 16)
    assert (hold.room_len, hold.bound_len, hold.evict_len) == (32, 0, 48)
    pages.extend([(hold, 40)])
    pages.check([hold])
    np.testing.assert_array_equal(hold.parts[0].firsts(4), [0, 16, 32, 40])
    hold.publish(TOKENS, 32)
    assert pages.pages._index.key_of.count(None) == ENGINE.num_pages  # none of it is listed


def test_a_hit_ends_before_the_last_token_and_where_a_policy_must_see_the_rest():
    pages = allocators()
    hold = begun(pages, 40)
    hold.publish(TOKENS, 40)
    for num_tokens, expected in [(40, 32), (41, 40), (8, 0)]:
        assert begun(pages).take_cached(TOKENS[:num_tokens], num_tokens - 1) == expected
    policy = get_policy("streaming")
    some = Hold(
        PageChain(b"root"), 0, Retention(policy=policy, page_size=SIZE, full_pages=4, low_pages=0)
    )
    some.begin(pages)
    assert some.take_cached(TOKENS, len(TOKENS) - 1) == 24


CORRUPTIONS = {
    "room": ("room_len", 32),
    "the tables": ("bound_len", 48),
    "part of a page": ("bound_len", 3),
    "when to list": ("publish_len", 7),
    "what was listed": ("num_published", 13),
    "when to ask": ("evict_len", 24),
    "too many tokens": ("num_stored", 33),
    "no policy": ("retention", None),
}


@pytest.mark.parametrize(("name", "wrong"), CORRUPTIONS.values(), ids=CORRUPTIONS)
def test_check_sees_a_corruption(name, wrong):
    pages = Allocators(replace(ENGINE, row_pages=4))
    hold = bounded(pages, 24)
    pages.check([hold])
    setattr(hold, name, wrong)
    with pytest.raises(RuntimeError):
        pages.check([hold])


def test_two_page_tables_have_pages_of_their_own():
    """Each part takes from the one allocator, all reach equally far."""
    pages = allocators(windows=(0, 8), num_pages=9)
    hold, other = begun(pages, 9), begun(pages, 1)
    assert [len(part.pages) for part in hold.parts] == [2, 2]
    with pytest.raises(CapacityError):
        pages.extend([(other, 17)])
    assert [len(part.pages) for part in other.parts] == [1, 1]
    assert pages.pages.num_used == 6
    pages.check([hold, other])
    hold.release()
    twin = other.fork()
    assert len(other.own_tail()) == 2
    pages.check([other, twin])


def test_nothing_is_taken_from_the_cache_behind_pages_that_are_reserved():
    for window in (0, 2 * SIZE):
        pages = allocators(windows=(window,), num_pages=16)
        begun(pages, 5 * SIZE).publish(TOKENS, 5 * SIZE)
        late = begun(pages, room=SIZE)
        assert late.take_cached(TOKENS, len(TOKENS) - 1) == 0
        late.check()


@pytest.mark.parametrize("window", [1, SIZE, 2 * SIZE + 3])
def test_the_longest_run_of_listed_pages_that_covers_the_window_is_found(window):
    """Whatever of a sequence's pages is listed still; compared with trying every length."""
    pages = allocators(windows=(window,), num_pages=16)
    chain, rng = PageChain(b"root"), np.random.default_rng(window)
    allocator = pages.pages
    for _ in range(40):
        allocator.forget()
        listed = np.flatnonzero(rng.random(8) < 0.7).tolist()
        for index in listed:
            key = chain.page(index, TOKENS, SIZE)
            handle = KVHandle(tuple(allocator.take(1)), SIZE)
            allocator.publish(handle, 0, [key], linked=False)
            allocator.release(handle, linked=False)
        best = 0
        for n in range(1, 9):
            first_seen = max(0, n * SIZE - window + 1) // SIZE
            best = n if set(range(first_seen, n)) <= set(listed) else best
        hold = Hold(PageChain(b"root"), 100)
        hold.begin(pages)
        assert hold.take_cached(TOKENS[: 8 * SIZE + 1], 8 * SIZE) == best * SIZE
        pages.check([hold])
        hold.release()


def test_a_bounded_sequence_finds_all_its_first_pages_among_those_of_windows():
    pages = allocators(windows=(2 * SIZE,), num_pages=16)
    begun(pages, 6 * SIZE).publish(TOKENS, 6 * SIZE)
    policy = get_policy("streaming")
    retention = Retention(policy=policy, page_size=SIZE, full_pages=6, low_pages=0)
    hold = Hold(PageChain(b"root"), 100, retention)
    hold.begin(pages)
    assert hold.take_cached(TOKENS, len(TOKENS) - 1) == retention.cached_len // SIZE * SIZE > SIZE


@pytest.mark.parametrize("window", [1, SIZE, 2 * SIZE + 3])
def test_each_table_takes_each_page_from_where_it_is(window):
    """The device or elsewhere; compared with trying every length."""
    pages, rng = allocators(windows=(0, window), num_pages=32), np.random.default_rng(window)
    chain = PageChain(b"root")
    keys = [list(chain.pages(0, 8, TOKENS, SIZE))]
    keys.append([(key + b"\1", tokens) for key, tokens in keys[0]])
    allocator = pages.pages
    for _ in range(40):
        allocator.forget()
        listed = [list(range(rng.integers(9))), np.flatnonzero(rng.random(8) < 0.5).tolist()]
        kept = {key for of_table in keys for key, _ in of_table if rng.random() < 0.6}
        for table, own in enumerate(listed):
            parent = KVHandle()
            for index in own:
                handle = KVHandle((*parent.pages, *allocator.take(1)), SIZE)
                allocator.publish(handle, len(parent.pages), [keys[table][index]], linked=not table)
                parent = KVHandle(handle.pages, 0) if not table else parent
                if table:
                    allocator.release(handle, linked=False)
            allocator.release(parent)
        best, wanted = 0, []
        for n in range(1, 9):
            first_seen = max(0, n * SIZE - window + 1) // SIZE
            needed = [(0, i) for i in range(n)] + [(1, i) for i in range(first_seen, n)]
            missing = [keys[table][i][0] for table, i in needed if i not in listed[table]]
            if kept.issuperset(missing):
                best, wanted = n, missing
        hold = begun(pages)
        loads = hold.take_kept(TOKENS, 8 * SIZE, kept.__contains__)
        assert hold.num_stored == best * SIZE
        assert [key for _, key in loads] == wanted
        assert {page for page, _ in loads} <= {page for part in hold.parts for page in part.pages}
        pages.check([hold])
        hold.release()
    pages.pages.forget()
    everything = begun(pages, 16 * SIZE)
    hold = begun(pages)
    assert hold.take_kept(TOKENS, 8 * SIZE, lambda _: True) == []
    assert hold.num_stored == 0
    pages.check([hold, everything])


def test_for_what_is_restored_pages_are_reserved_that_later_queries_see():
    for window in (1, SIZE, 2 * SIZE + 3):
        pages = allocators(windows=(0, window), num_pages=32)
        hold = begun(pages)
        hold.extend_seen(6 * SIZE)
        hold.num_stored = 6 * SIZE
        gone = (6 * SIZE - window + 1) // SIZE
        assert [part.num_gone for part in hold.parts] == [0, gone * SIZE]
        assert [len(part.pages) for part in hold.parts] == [6, 6 - gone]
        held = [list(part.pages) for part in hold.parts]
        hold.drop_unseen()
        assert [part.pages for part in hold.parts] == held
        pages.check([hold])
        hold.publish(TOKENS, 6 * SIZE)
        late = begun(pages)
        assert late.take_cached(TOKENS, 6 * SIZE) == 6 * SIZE
        # Of what comes right before, only what is listed is there.
        assert late.listed_before(late.parts[1], 0, TOKENS) == []
        with pytest.raises(CapacityError):
            begun(pages).extend_seen(64 * SIZE)
        hold.release()
        late.release()
        pages.check([])
