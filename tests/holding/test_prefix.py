"""Cached pages are found by everything before them, by nothing else, and leave before what they
follow.
"""

from array import array
from itertools import product

import pytest

from handles import filled, reserved
from jaxkv.holding.allocator import KVHandle, PageAllocator
from jaxkv.holding.prefix import PageChain, PrefixIndex, root_key

SIZE = 4
TOKENS = array("i", range(40))


def listed(allocator: PageAllocator, tokens: array, root: bytes = b"root") -> KVHandle:
    """A handle on all of the tokens, whose full pages are listed."""
    handle = filled(allocator, len(tokens))
    chain = PageChain(root)
    num_pages = len(tokens) // SIZE
    handle, num_listed = allocator.publish(handle, 0, chain.pages(0, num_pages, tokens, SIZE))
    assert num_listed == num_pages
    return handle


def found(allocator: PageAllocator, tokens: array, root: bytes = b"root") -> KVHandle:
    chain, num_pages = PageChain(root), len(tokens) // SIZE
    pages = allocator.find(chain.pages(0, num_pages, tokens, SIZE), None)
    allocator.share(pages)
    return KVHandle(tuple(pages), len(pages) * SIZE)


def test_a_key_depends_on_the_root_and_every_token_up_to_its_page_s_end():
    keys = {PageChain(root).page(2, TOKENS, SIZE)[0] for root in (b"a", b"b")}
    for changed in range(3 * SIZE):
        other = array("i", [99 if i == changed else token for i, token in enumerate(TOKENS)])
        keys.add(PageChain(b"a").page(2, other, SIZE)[0])
    assert len(keys) == 2 + 3 * SIZE
    assert PageChain(b"a").page(2, TOKENS[: 3 * SIZE] + array("i", [99]), SIZE)[0] in keys


def test_roots_tell_their_parts_apart():
    parts = ["", "a", "b", "ab", "a\0b", "1,1"]
    roots = {root_key(secret, *pair) for secret in (b"x", b"y") for pair in product(parts, parts)}
    assert len(roots) == 2 * len(parts) ** 2


def test_a_key_that_other_tokens_or_another_parent_have_is_a_miss():
    index, key = PrefixIndex(9), (b"key", b"tokens")
    assert index.add(key, 7, 3)
    assert index.find(key, 3) == 7
    assert index.find((b"key", b"others"), 3) is None
    assert index.find(key, None) is None
    assert not index.add(key, 8, 3)
    assert index.find(key, 3) == 7


def test_a_collision_leaves_the_second_page_with_its_owner_alone():
    allocator = PageAllocator(8, SIZE)
    first = listed(allocator, TOKENS[:SIZE])
    key = PageChain(b"root").page(0, TOKENS, SIZE)
    other = filled(allocator, SIZE)
    assert allocator.publish(other, 0, [(key[0], b"others")]) == (other, 0)
    allocator.check([first, other])


def test_equal_pages_become_one():
    allocator = PageAllocator(8, SIZE)
    first, second = listed(allocator, TOKENS[:10]), listed(allocator, TOKENS[:10])
    assert first.pages[:2] == second.pages[:2]
    assert first.pages[2] != second.pages[2]  # not full
    assert allocator.num_used == 4
    allocator.check([first, second])


@pytest.mark.parametrize(
    ("num_taken", "lengths"),
    [(2, (12, 12)), (3, (8, 12)), (5, (0, 12)), (6, (0, 8)), (7, (0, 4)), (8, (0, 0))],
)
def test_pages_that_nobody_holds_stay_until_they_are_needed_the_last_of_the_oldest_first(
    num_taken, lengths
):
    allocator = PageAllocator(8, SIZE)
    old, new = listed(allocator, TOKENS[:12]), listed(allocator, TOKENS[20:32])
    allocator.release(old)
    allocator.release(new)
    assert (allocator.num_free, allocator.num_used) == (8, 0)
    taken = reserved(allocator, num_taken * SIZE)
    handles = [found(allocator, TOKENS[:12]), found(allocator, TOKENS[20:32])]
    assert tuple(handle.length for handle in handles) == lengths
    allocator.check([taken, *handles])


def test_a_page_in_use_is_not_given_to_others():
    allocator = PageAllocator(4, SIZE)
    allocator.release(listed(allocator, TOKENS[:12]))
    held = found(allocator, TOKENS[:12])
    assert (held.length, allocator.num_free) == (12, 1)
    assert allocator.take(1)[0] not in held.pages
    with pytest.raises(Exception, match="1 pages of 4 tokens needed, 0 free"):
        allocator.take(1)


def test_what_is_forgotten_is_not_found_and_not_listed_after():
    allocator = PageAllocator(8, SIZE)
    held = listed(allocator, TOKENS[:8])
    allocator.release(listed(allocator, TOKENS[20:28]))
    allocator.forget()
    assert found(allocator, TOKENS[:8]) == found(allocator, TOKENS[20:28]) == KVHandle()
    held = KVHandle(reserved(allocator, 12, held).pages, 12)
    key = PageChain(b"root").page(2, TOKENS, SIZE)
    assert allocator.publish(held, 2, [key]) == (held, 0)  # its parent is not
    allocator.check([held])
    allocator.release(held)
    allocator.check([])
    assert allocator.num_free == 8


def test_what_follows_a_page_that_leaves_leaves_with_it_held_or_cached():
    """A policy may keep a page without those before it."""
    allocator = PageAllocator(5, SIZE)
    first, *rest = listed(allocator, TOKENS[: 5 * SIZE]).pages
    held, cached = rest[:2], rest[2:]
    allocator.release(KVHandle((first,)))
    allocator.release(KVHandle(tuple(cached)))
    keeping = KVHandle(tuple(held), 2 * SIZE)
    allocator.check([keeping])
    taken = KVHandle(tuple(allocator.take(1)))
    assert taken.pages == (first,)
    assert found(allocator, TOKENS[: 5 * SIZE]).pages == ()
    allocator.check([keeping, taken])
    others = KVHandle(tuple(allocator.take(2)))
    assert set(others.pages) == set(cached)
    allocator.release(keeping)
    allocator.check([taken, others])
    assert allocator.num_free == 2
