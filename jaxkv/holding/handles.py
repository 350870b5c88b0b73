"""Pages of rows as plain values, without an allocator: what is free follows from the handles."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from jaxkv.errors import CapacityError
from jaxkv.holding.allocator import KVHandle


def free_pages(handles: Sequence[KVHandle], num_pages: int) -> tuple[int, ...]:
    """Returns the ids of the pages that no handle holds."""
    held = {page for handle in handles for page in handle.pages}
    return tuple(page for page in range(num_pages) if page not in held)


def cut(handle: KVHandle, length: int, page_size: int) -> KVHandle:
    """Returns the handle of the first `length` tokens, with the pages that these take."""
    return KVHandle(handle.pages[: -(-length // page_size)], length)


def reserve(
    handles: Sequence[KVHandle], counts: Mapping[int, int], *, num_pages: int, page_size: int
) -> tuple[tuple[KVHandle, ...], list[tuple[int, int]]]:
    """Gives the handles of some rows room for so many more tokens, in pages that nobody else holds.

    Returns all handles, their lengths as before, and the (source, target) page copies that must
    come before the next write: of partly filled last pages that others hold too. The last holder
    to write keeps such a page.
    Raises: CapacityError if fewer pages are free than all of these rows need.
    """
    free, num_taken = free_pages(handles, num_pages), 0
    holders = Counter(page for handle in handles for page in handle.pages)
    changed, copies = list(handles), list[tuple[int, int]]()
    for row, count in counts.items():
        pages, length = handles[row].pages, handles[row].length
        shared: tuple[int, ...] = ()
        if count and length % page_size and holders[pages[-1]] > 1:
            pages, shared = pages[:-1], pages[-1:]
            holders.subtract(shared)
        missing = -(-(length + count) // page_size) - len(pages)
        new = free[num_taken : num_taken + missing]
        num_taken += missing
        copies += zip(shared, new, strict=False)
        changed[row] = KVHandle(pages + new, length)
    if num_taken > len(free):
        raise CapacityError(f"{num_taken} pages of {page_size} tokens needed, {len(free)} free")
    return tuple(changed), copies
