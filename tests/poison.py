"""NaN in every slot of the KV pool that nobody owns: memory that must not matter is made to matter
if it is read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import jax.numpy as jnp
import numpy as np

from jaxkv.engine.engine import Engine
from jaxkv.holding.allocator import KVHandle
from jaxkv.kv.state import PagedKV, Store

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


def poison_store(store: Store, owned_PS: np.ndarray) -> Store:
    """The store with NaN in every slot that is not owned, in all layers and heads. Where a page has
    one for all of its tokens it is owned with any of them.
    """
    if store.page_size == 1:
        owned_PS = owned_PS.any(axis=1, keepdims=True)
    pages = np.array(store.pages)
    by_slot = pages.reshape(store.num_layers, store.num_pages, *pages.shape[1:]).swapaxes(
        2, 3
    )  # a view
    by_slot[:, ~owned_PS] = nan_of(pages.dtype)
    return replace(
        store, pages=jnp.array(pages, copy=True)
    )  # not an alias of numpy's memory: it will be donated


def poison_kv(kv: PagedKV, handles: Iterable[KVHandle]) -> PagedKV:
    first = kv.stores[0]
    owned_PS = owned_slots(handles, num_pages=first.num_pages, page_size=first.page_size)
    return replace(kv, stores=tuple(poison_store(store, owned_PS) for store in kv.stores))


def poison(engine: Engine) -> None:
    """Overwrites what neither a running request nor the prefix cache owns, tail slots past each
    length included.
    """
    allocator = engine.scheduler.allocator
    cached = [
        KVHandle((page,), allocator.page_size) for page in (*allocator._cached, *allocator._pinned)
    ]
    holds = [request.hold for request in engine.scheduler.running]
    held = [hold.handle(part.number) for hold in holds for part in hold.parts]
    kv = poison_kv(engine.kv, held + cached)
    kept = [hold.kept.handle for hold in holds if hold.kept]
    kv = replace(kv, stores=tuple(poison_low(store, kept) for store in kv.stores))
    running = engine.scheduler.running
    used = {request.row for request in running if request.hold.num_stored}
    used |= {*allocator.snapshots._slot_of.values()}
    engine.kv = poison_states(kv, used, num_slots=engine.scheduler.config.num_slots)


def poison_states(kv: PagedKV, used: Collection[int | None], *, num_slots: int) -> PagedKV:
    """The state with NaN in the recurrent states of every slot that is not in use."""
    states = []
    for arrays in kv.states:
        made = [np.array(array) for array in arrays]
        for array in made:
            by_slot = array.reshape(-1, num_slots, *array.shape[1:])  # a view
            by_slot[:, [slot for slot in range(num_slots) if slot not in used]] = np.nan
        states.append(tuple(jnp.array(array, copy=True) for array in made))
    return replace(kv, states=tuple(states))


def poison_low(store: Store, handles: Iterable[KVHandle]) -> Store:
    """The store with NaN in the demoted pages that nobody holds."""
    if store.low is None:
        return store
    owned_PS = owned_slots(handles, num_pages=store.low.num_pages, page_size=store.low.page_size)
    return replace(store, low=poison_store(store.low, owned_PS))


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
