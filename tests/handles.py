"""Handles on pages for tests that have an allocator and no hold."""

from __future__ import annotations

from jaxkv.holding.allocator import KVHandle, PageAllocator


def reserved(allocator: PageAllocator, num_tokens: int, handle: KVHandle | None = None) -> KVHandle:
    """Returns the handle, by default one of no tokens, with pages for so many in all."""
    handle = KVHandle() if handle is None else handle
    missing = allocator.pages_for(num_tokens) - len(handle.pages)
    return KVHandle((*handle.pages, *allocator.take(max(0, missing))), handle.length)


def filled(allocator: PageAllocator, length: int, room: int = 0) -> KVHandle:
    """Returns a handle with `length` tokens stored, and pages for `room` if that is more."""
    return KVHandle(reserved(allocator, max(length, room)).pages, length)
