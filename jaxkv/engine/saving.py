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

from jaxkv.engine.engine import Engine
from jaxkv.engine.pages import MOVED_AT_ONCE, chunks
from jaxkv.errors import CapacityError, SavedFileError
from jaxkv.holding.hold import Hold, Part
from jaxkv.holding.prefix import PageChain
from jaxkv.kv.codecs import PlainCodec
from jaxkv.kv.layout import PageLayout
from jaxkv.kv.saved import Origin, SavedPages, rounded
from jaxkv.kv.state import PagedKV
from jaxkv.models.spec import ModelSpec
from jaxkv.programs.pages import read_pages, write_pages

BY_TOKEN = "tokens"


class Places:
    """Knows where an engine keeps the keys and values of each layer: in which page table, in which
    store, and as which of that store's layers.
    """

    def __init__(self, spec: ModelSpec, kv: PagedKV, num_tables: int) -> None:
        self.of: dict[int, tuple[int, int, int]] = {}
        alone = len(kv.stores) == num_tables == 1
        for layer in spec.kv_layers:
            group, index = spec.group_of(layer)
            index = spec.kv_layers.index(layer) if alone else index
            table = group if num_tables > 1 else 0
            self.of[layer] = (table, group if len(kv.stores) > 1 else 0, index)
        self.head_dims = {layer: spec.groups[spec.group_of(layer)[0]].head_dim for layer in self.of}

    def layers_in(self, table: int, store: int) -> dict[int, int]:
        """Returns the layers of a table whose pages are in a store: layer -> its index there."""
        return {
            layer: index for layer, (t, s, index) in self.of.items() if (t, s) == (table, store)
        }


def refuse_unsaved(engine: Engine) -> None:
    """Raises: NotImplementedError for KV states of which pages are not all, ValueError for an
    engine that sleeps.
    """
    engine.check_awake()
    kv = engine.kv
    if kv.states:
        raise NotImplementedError("save: recurrent states are not built in; save the tokens")
    if any(store.extremes is not None for store in kv.stores):
        raise NotImplementedError("save: kv_policy quest is not built in; save the tokens")


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


def extract(
    engine: Engine, tokens: Sequence[int], root: bytes, origin: Origin, extra: Mapping[str, Any]
) -> SavedPages | None:
    """Reads the full pages of these tokens, whose keys begin with `root`. None: not all are there
    (any more).
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
            layers, firsts = _read(engine, hold, origin.form == BY_TOKEN)
        finally:
            engine.change(hold.release)
    return replace(saved, layers=layers, firsts=firsts)


def _found(engine: Engine, hold: Hold, tokens: array[int], num_tokens: int) -> bool:
    hold.begin(engine.scheduler.allocators)
    hold.take_cached(tokens, num_tokens)
    return hold.num_stored == num_tokens


def _read(
    engine: Engine, hold: Hold, by_token: bool
) -> tuple[dict[int, tuple[np.ndarray, ...]], dict[int, int]]:
    places = _places(engine)
    layers: dict[int, tuple[np.ndarray, ...]] = {}
    firsts: dict[int, int] = {}
    for part in hold.parts:
        read: list[list[list[np.ndarray]]] = [[] for _ in engine.kv.stores]
        for page_C, n in chunks(part.pages):
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
                    arrays = _vectors(store.layout, arrays, places.head_dims[layer])
                layers[layer], firsts[layer] = arrays, part.num_gone
    return layers, firsts


def _vectors(
    layout: PageLayout, arrays: tuple[np.ndarray, ...], head_dim: int
) -> tuple[np.ndarray, ...]:
    """Returns keys and values [T, K, H], of one layer's pages; keys alone where values are in
    them.
    """
    k, v = layout.unpack([jax.device_put(x[None]) for x in arrays])
    found = [k] if layout.latent_dim is not None else [k, v]
    return tuple(rounded(np.asarray(x)[0, ..., :head_dim], layout.codec.dtype) for x in found)


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
    config, kv, places = engine.scheduler.config, engine.kv, _places(engine)
    size, num_tokens = saved.origin.page_size, len(saved.tokens)
    if config.has_windows and size != config.block_size:
        raise SavedFileError(
            f"block_size: expected {size}, as the model has windows, got {config.block_size}"
        )
    if size < 1 or num_tokens % size:
        raise SavedFileError(f"tokens: expected whole pages of {size}, got {num_tokens}")
    expected = set(places.of) if num_tokens else set()
    if not saved.layers.keys() == saved.firsts.keys() == expected:
        raise SavedFileError(f"layers: expected {sorted(expected)}, got {sorted(saved.layers)}")
    for layer, of_layer in saved.layers.items():
        table, s, _ = places.of[layer]
        store, window = kv.stores[s], config.windows[table]
        part = Part(engine.scheduler.allocator, table, window)
        first = part.num_unseen(num_tokens) * config.block_size
        if saved.firsts[layer] != first:
            raise SavedFileError(
                f"layer {layer}: expected tokens from {first} on, got {saved.firsts[layer]}"
            )
        if saved.origin.form == BY_TOKEN:
            heads = store.layout.num_kv_heads * store.layout.num_devices(store.pages)
            shape: tuple[int, ...] = (num_tokens - first, heads, places.head_dims[layer])
            count = 1 if store.layout.latent_dim is not None else 2
            wanted = [(shape, rounded(np.zeros(0), store.layout.codec.dtype).dtype)] * count
        else:
            num_pages = (num_tokens - first) // size
            wanted = [((num_pages, *x.shape[1:]), x.dtype) for x in store.arrays]
        if (got := [(x.shape, x.dtype) for x in of_layer]) != wanted:
            raise SavedFileError(f"layer {layer}: expected arrays {wanted}, got {got}")


def _insert(engine: Engine, hold: Hold, saved: SavedPages, tokens: array[int]) -> bool:
    """Returns whether there was room."""
    hold.begin(engine.scheduler.allocators)
    found = hold.take_cached(tokens, len(tokens))
    try:
        hold.extend(len(tokens))
    except CapacityError:
        hold.release()
        return False
    engine.move_pages_aside()
    places, size = _places(engine), hold.page_size
    for part in hold.parts:
        for s in range(len(engine.kv.stores)):
            own = places.layers_in(part.number, s)
            start = max([found, *(saved.firsts[layer] for layer in own)])
            pages = part.pages[(start - part.num_gone) // size :]
            for page_C, n in chunks(pages) if own else ():
                arrays = _arrays(engine, saved, places, own, s, range(start, start + n * size))
                state = replace(engine.kv, rows=())
                engine.kv = write_pages(state, page_C, arrays, np.int32(n), s=s)
                start += n * size
    hold.num_stored = len(tokens)
    hold.drop_unseen()
    hold.publish(tokens, len(tokens))
    hold.release()
    return True


def _arrays(
    engine: Engine, saved: SavedPages, places: Places, own: dict[int, int], s: int, span: range
) -> tuple[np.ndarray, ...]:
    """Returns the arrays of some pages of store s, which have the tokens at these positions, in
    every layer, [L, C, ...].
    """
    store = engine.kv.stores[s]
    layout, size = store.layout, store.page_size
    found = [
        np.zeros((store.num_layers, MOVED_AT_ONCE, *x.shape[1:]), x.dtype) for x in store.arrays
    ]
    for layer, index in own.items():
        begin = span.start - saved.firsts[layer]
        if saved.origin.form == BY_TOKEN:
            vectors = [
                _wide(x[begin : begin + len(span)], layout.head_dim) for x in saved.layers[layer]
            ]
            packed = layout.pack(vectors[0], vectors[1] if len(vectors) > 1 else None)
            own_pages = [np.asarray(x)[0] for x in packed]
        else:
            first = begin // size
            own_pages = [x[first : first + len(span) // size] for x in saved.layers[layer]]
        for whole, some in zip(found, own_pages, strict=True):
            whole[index, : len(some)] = some
    return tuple(found)


def _wide(x_TKH: np.ndarray, size: int) -> jax.Array:
    """Returns vectors [1, T, K, H] with zeros behind them, as pages of a larger head size have."""
    missing = size - x_TKH.shape[-1]
    return jax.device_put(np.pad(x_TKH.astype(np.float32), ((0, 0), (0, 0), (0, missing)))[None])


def _places(engine: Engine) -> Places:
    return Places(engine.programs.spec, engine.kv, len(engine.scheduler.config.windows))
