"""NaN in every slot of the KV pool that nobody owns: memory that must not matter is made to matter
if it is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import jax.numpy as jnp
import numpy as np

from jaxkv.engine.engine import Engine
from jaxkv.holding.allocator import KVHandle
from jaxkv.kv.state import GroupKV, PagedKV

BFLOAT16_NAN = 0x7FC0


def nan_of(dtype: np.dtype) -> np.ndarray:
    """NaN as it is stored: uint16 holds the bits of bfloat16, and quantised vectors end with those
    of their scale.
    """
    bits = {np.dtype(np.uint16): BFLOAT16_NAN, np.dtype(np.uint8): 0xFF}
    return np.asarray(bits[dtype], dtype) if dtype in bits else np.asarray(np.nan, dtype)


def owned_slots(handles: Iterable[KVHandle], *, num_pages: int, page_size: int) -> np.ndarray:
    """[P, S] bool: slots that hold a token of any of the handles; shared pages count once."""
    owned_PS = np.zeros((num_pages, page_size), bool)
    for handle in handles:
        for index, page in enumerate(handle.pages):
            owned_PS[page, : max(0, handle.length - index * page_size)] = True
    return owned_PS


def poison_group(group: GroupKV, owned_PS: np.ndarray) -> GroupKV:
    """The group with NaN in every slot that is not owned, in all layers and heads."""
    pages = np.array(group.pages)
    by_slot = pages.reshape(group.num_layers, group.num_pages, *pages.shape[1:]).swapaxes(
        2, 3
    )  # a view
    by_slot[:, ~owned_PS] = nan_of(pages.dtype)
    return replace(
        group, pages=jnp.array(pages, copy=True)
    )  # not an alias of numpy's memory: it will be donated


def poison_kv(kv: PagedKV, handles: Iterable[KVHandle]) -> PagedKV:
    first = kv.groups[0]
    owned_PS = owned_slots(handles, num_pages=first.num_pages, page_size=first.page_size)
    return replace(kv, groups=tuple(poison_group(group, owned_PS) for group in kv.groups))


def poison(engine: Engine) -> None:
    """Overwrites what neither a running request nor the prefix cache owns, tail slots past each
    length included.
    """
    allocator = engine.scheduler.allocator
    cached = [KVHandle((page,), allocator.page_size) for page in allocator._cached]
    running = engine.scheduler.running
    kv = poison_kv(engine.kv, [request.hold.handle() for request in running] + cached)
    kept = [one.hold.kept.handle for one in running if one.hold.kept]
    engine.kv = replace(kv, groups=tuple(poison_low(group, kept) for group in kv.groups))


def poison_low(group: GroupKV, handles: Iterable[KVHandle]) -> GroupKV:
    """The group with NaN in the demoted pages that nobody holds."""
    if group.low is None:
        return group
    owned_PS = owned_slots(handles, num_pages=group.low.num_pages, page_size=group.low.page_size)
    return replace(group, low=poison_group(group.low, owned_PS))


@contextmanager
def poisoned(engine: Engine) -> Iterator[None]:
    """Poisons before every `engine.step()`, and checks the engine's invariants around it."""
    step = engine.step

    def poisoned_step() -> list:
        poison(engine)
        stepped = step()
        engine.check()
        return stepped

    engine.step = poisoned_step
    try:
        yield
    finally:
        del engine.step
