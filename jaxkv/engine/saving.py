"""Takes what a sequence holds of the KV state off the device, and puts it back: in another process,
on another number of devices, with pages of another size or another backend's.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from jaxkv.config import PAGE_SIZES
from jaxkv.engine.engine import Engine
from jaxkv.engine.pages import chunks, moved_at_once
from jaxkv.engine.places import fitted_keys, places_of, stored_as, vectors
from jaxkv.errors import CapacityError, SavedFileError
from jaxkv.holding.hold import Hold, Part
from jaxkv.holding.prefix import PageChain
from jaxkv.kv.codecs import PlainCodec
from jaxkv.kv.layout import PageLayout, described
from jaxkv.kv.saved import BY_TOKEN, Origin, SavedPages, rounded
from jaxkv.kv.state import PagedKV
from jaxkv.programs.pages import read_pages, read_states, write_pages, write_states


def refuse_unsaved(engine: Engine) -> None:
    """Raises: NotImplementedError or ValueError for KV states of which pages are not all, and for
    an engine that sleeps.
    """
    engine.check_awake()
    if engine.kv.num_draft:
        raise NotImplementedError("save: a draft model is not built in; save the tokens")
    if any(store.extremes is not None for store in engine.kv.stores):
        raise NotImplementedError("save: kv_policy quest is not built in; save the tokens")
    if 1 in engine.scheduler.config.windows:  # no page has what is seen later
        raise NotImplementedError("save: a window of one token is not built in; save the tokens")
    if engine.kv.states and not engine.scheduler.allocator.snapshots.num_slots:
        raise ValueError("num_state_snapshots: expected more than 0, to save a session, got 0")


def form_of(kv: PagedKV) -> str:
    """Returns what saved arrays are like: by token, where every codec is plain, so that any layout
    can take them; else as this engine's pages are.
    """
    layouts = [store.layout for store in kv.stores]
    if all(isinstance(layout.codec, PlainCodec) for layout in layouts):
        return BY_TOKEN
    return page_form(kv)


def page_form(kv: PagedKV) -> str:
    """Returns what the arrays of this engine's pages are like."""
    return repr([(store.layout, store.layout.num_devices(store.pages)) for store in kv.stores])


def saved_len(engine: Engine, num_tokens: int) -> int:
    """Returns how many of so many tokens to extract: those of full pages. A recurrent state is of
    one position, and a window begins somewhere in a page: with these it is as many as fill pages of
    any size, and are followed by a token that is computed.
    """
    config = engine.scheduler.config
    # They are computed by a prompt of one more, which has room for one that is generated.
    num_tokens = min(num_tokens, config.max_model_len - 2)
    if not (config.has_states or config.has_windows):
        return num_tokens // config.block_size * config.block_size
    power = 1 << max(0, num_tokens - 1).bit_length() >> 1  # the largest below num_tokens
    size = max(config.block_size, min(power, PAGE_SIZES[-1]))
    return (num_tokens - 1) // size * size


def extract(
    engine: Engine, tokens: Sequence[int], root: bytes, origin: Origin, extra: Mapping[str, Any]
) -> SavedPages | None:
    """Reads the full pages of these tokens, whose keys begin with `root`, and the recurrent states
    behind the last one. None: not all are there (any more).
    """
    refuse_unsaved(engine)
    packed, size = array("i", tokens), engine.scheduler.config.block_size
    num_tokens = len(packed) // size * size
    saved = SavedPages(origin=origin, tokens=tuple(packed[:num_tokens]), extra=extra)
    if not num_tokens:
        return saved
    hold = Hold(PageChain(root), num_tokens)
    with engine.lock:
        try:
            if not engine.change(lambda: _found(engine, hold, packed, num_tokens)):
                return None
            saved = replace(saved, **_read(engine, hold, packed, origin.form == BY_TOKEN))
            if hold.source is not None:
                slot, num_slots = np.int32(hold.source), engine.scheduler.config.num_slots
                found = read_states(replace(engine.kv, rows=()), slot, num_slots=num_slots)
                saved = replace(saved, states=jax.tree.map(np.asarray, found))
        finally:
            engine.change(hold.release)
    return saved


def _found(engine: Engine, hold: Hold, tokens: array[int], num_tokens: int) -> bool:
    hold.begin(engine.scheduler.allocators)
    hold.take_cached(tokens, num_tokens)
    return hold.num_stored == num_tokens


def _read(engine: Engine, hold: Hold, tokens: array[int], by_token: bool) -> dict[str, Any]:
    """Returns `layers` and what else `SavedPages` has of them."""
    places, size = places_of(engine), hold.page_size
    at_once, _ = moved_at_once(engine.kv)
    layers: dict[int, tuple[np.ndarray, ...]] = {}
    firsts: dict[int, int] = {}
    layouts: dict[int, dict[str, Any]] = {}
    for part in hold.parts:
        # A larger page may begin before the first one that is seen.
        unseen = max(0, hold.num_stored - part.window + 1) if part.window else 0
        before = hold.listed_before(part, unseen // PAGE_SIZES[-1] * PAGE_SIZES[-1] // size, tokens)
        read: list[list[list[np.ndarray]]] = [[] for _ in engine.kv.stores]
        for page_C, n in chunks([*before, *part.pages], at_once):
            found = read_pages(replace(engine.kv, rows=()), page_C)
            for into, arrays in zip(read, found, strict=True):
                into.append([np.asarray(x)[:, :n] for x in arrays])
        for s, store in enumerate(engine.kv.stores):
            own = places.layers_in(part.number, s)
            if not own:
                continue
            whole = tuple(np.concatenate(parts, 1) for parts in zip(*read[s], strict=True))
            for layer, index in own.items():
                arrays = tuple(x[index] for x in whole)
                if by_token:
                    found = vectors(store.layout, arrays, places.head_dims[layer])
                    arrays = tuple(rounded(x, stored_as(store)) for x in found)
                else:
                    layouts[layer] = described(store.layout)
                layers[layer], firsts[layer] = arrays, part.num_gone - len(before) * size
    keys = fitted_keys(engine.weights, places)
    return {"layers": layers, "firsts": firsts, "layouts": layouts, "keys": keys}


def insert(engine: Engine, saved: SavedPages, root: bytes) -> None:
    """Stores the pages that are not there already, listed under keys that begin with `root`: who
    begins with their tokens finds them, until their room is needed.

    Raises: SavedFileError for what this engine cannot have stored, CapacityError if there are too
    few pages, both with nothing changed.
    """
    refuse_unsaved(engine)
    _check(engine, saved)
    size = engine.scheduler.config.block_size
    num_tokens = len(saved.tokens) // size * size
    tokens = array("i", saved.tokens[:num_tokens])
    hold = Hold(PageChain(root), num_tokens)
    if num_tokens and not engine.change(lambda: _insert(engine, hold, saved, tokens)):
        raise CapacityError(f"no room for the pages of {num_tokens} saved tokens")


def _check(engine: Engine, saved: SavedPages) -> None:
    """Raises: SavedFileError unless this is what `extract` gives of this engine's model: a file may
    be made up, with its hashes.
    """
    config, kv, places = engine.scheduler.config, engine.kv, places_of(engine)
    size, num_tokens = saved.origin.page_size, len(saved.tokens)
    if size < 1 or num_tokens % size:
        raise SavedFileError(f"tokens: expected whole pages of {size}, got {num_tokens}")
    expected = set(places.of) if num_tokens else set()
    if not saved.layers.keys() == saved.firsts.keys() == expected:
        raise SavedFileError(f"layers: expected {sorted(expected)}, got {sorted(saved.layers)}")
    num_stored = num_tokens // config.block_size * config.block_size
    for layer, of_layer in saved.layers.items():
        table, s, _ = places.of[layer]
        store, window = kv.stores[s], config.windows[table]
        part = Part(engine.scheduler.allocator, table, window)
        needed = part.num_unseen(num_stored) * config.block_size
        first = saved.firsts[layer]
        if not 0 <= first <= needed or first % size:
            raise SavedFileError(
                f"layer {layer}: expected tokens from {needed} on, for pages of "
                f"{config.block_size}, got those from {first} on, in pages of {size}"
            )
        if saved.origin.form == BY_TOKEN:
            heads = store.num_kv_heads
            vectors = [heads + store.layout.has_index_key]
            if store.layout.latent_dim is None:
                vectors.append(heads)
            dtype = rounded(np.zeros(0), stored_as(store)).dtype
            ends = (num_tokens - first, places.head_dims[layer])
            shapes: list[tuple[int, ...]] = [(ends[0], count, ends[1]) for count in vectors]
            wanted = [(shape, dtype) for shape in shapes]
        else:
            num_pages = (num_tokens - first) // size
            wanted = [((num_pages, *x.shape[1:]), x.dtype) for x in store.arrays]
        if (got := [(x.shape, x.dtype) for x in of_layer]) != wanted:
            raise SavedFileError(f"layer {layer}: expected arrays {wanted}, got {got}")
    _check_states(engine, saved)


def _check_states(engine: Engine, saved: SavedPages) -> None:
    """Raises: SavedFileError for recurrent states that are not those behind full pages."""
    config, num_tokens = engine.scheduler.config, len(saved.tokens)
    wanted = [
        [((x.shape[0] // config.num_slots, *x.shape[1:]), x.dtype) for x in arrays]
        for arrays in (engine.kv.states if num_tokens else ())
    ]
    got = [[(x.shape, x.dtype) for x in arrays] for arrays in saved.states]
    if got != wanted:
        raise SavedFileError(f"recurrent states: expected {wanted}, got {got}")
    if wanted and num_tokens // config.block_size * config.block_size not in (0, num_tokens):
        raise SavedFileError(
            f"block_size: expected a divisor of {num_tokens}, the tokens behind which the "
            f"recurrent states are, got {config.block_size}"
        )


def _insert(engine: Engine, hold: Hold, saved: SavedPages, tokens: array[int]) -> bool:
    """Returns whether there was room."""
    hold.begin(engine.scheduler.allocators)
    found = hold.take_cached(tokens, len(tokens))
    try:
        hold.extend_seen(len(tokens))
    except CapacityError:
        hold.release()
        return False
    engine.move_pages_aside()
    places, size = places_of(engine), hold.page_size
    at_once, most_in_flight = moved_at_once(engine.kv)
    num_in_flight = 0
    for part in hold.parts:
        for s in range(len(engine.kv.stores)):
            own = places.layers_in(part.number, s)
            start = max(found, part.num_gone)
            pages = part.pages[(start - part.num_gone) // size :]
            for page_C, n in chunks(pages, at_once) if own else ():
                arrays = _arrays(engine, saved, own, s, range(start, start + n * size), at_once)
                if num_in_flight == most_in_flight:
                    jax.block_until_ready(engine.kv.pools)
                    num_in_flight = 0
                num_in_flight += 1
                state = replace(engine.kv, rows=())
                engine.kv = write_pages(state, page_C, arrays, np.int32(n), s=s)
                start += n * size
    hold.num_stored = len(tokens)
    hold.drop_unseen()
    hold.publish(tokens, len(tokens))
    if saved.states:
        _insert_states(engine, hold.parts[0].pages[-1], saved)
    hold.release()
    return True


def _insert_states(engine: Engine, page: int, saved: SavedPages) -> None:
    """Keeps the states beside the last page, unless it has some."""
    allocator, num_slots = engine.scheduler.allocator, engine.scheduler.config.num_slots
    if page not in allocator.snapshots and allocator.is_listed(page):
        slot = np.int32(allocator.snapshots.take(page))
        state = replace(engine.kv, rows=())
        engine.kv = write_states(state, slot, saved.states, num_slots=num_slots)


def _arrays(
    engine: Engine, saved: SavedPages, own: dict[int, int], s: int, span: range, at_once: int
) -> tuple[np.ndarray, ...]:
    """Returns the arrays of up to `at_once` pages of store s, which have the tokens at these
    positions, in every layer, [L, C, ...].
    """
    store, by_token = engine.kv.stores[s], saved.origin.form == BY_TOKEN
    unit = 1 if by_token else store.page_size
    given = []
    for layer in own:
        begin = (span.start - saved.firsts[layer]) // unit
        given.append([x[begin : begin + len(span) // unit] for x in saved.layers[layer]])
    if by_token:
        given = _packed(store.layout, given, at_once)
    found = tuple(
        np.zeros((store.num_layers, at_once, *x.shape[1:]), x.dtype) for x in store.arrays
    )
    for index, pages in zip(own.values(), given, strict=True):
        for whole, some in zip(found, pages, strict=True):
            whole[index, : len(some)] = some
    return found


def _packed(
    layout: PageLayout, given: list[list[np.ndarray]], at_once: int
) -> list[list[np.ndarray]]:
    """Returns the pages of keys and values by layer, with zeros behind them as larger heads have.
    They are `at_once` always: what packs them is compiled for each number once.
    """
    wide = []
    for of_layers in zip(*given, strict=True):
        num_tokens, heads, head_dim = of_layers[0].shape
        shape = (len(of_layers), at_once * layout.page_size, heads, layout.head_dim)
        whole = np.zeros(shape, np.float32)
        for i, x_TKH in enumerate(of_layers):
            whole[i, :num_tokens, :, :head_dim] = x_TKH
        wide.append(jax.device_put(whole))
    packed = [np.asarray(x) for x in layout.pack(wide[0], wide[1] if len(wide) > 1 else None)]
    return [list(pages) for pages in zip(*packed, strict=True)]
