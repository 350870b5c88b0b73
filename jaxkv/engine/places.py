"""Knows where an engine keeps keys and values of which layer, and stores them anew where they come
from pages of another codec.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np

from jaxkv.engine.engine import Engine
from jaxkv.errors import SavedFileError
from jaxkv.kv.codecs import PlainCodec
from jaxkv.kv.layout import PageLayout, layout_of
from jaxkv.kv.saved import BY_TOKEN, SavedPages, rounded
from jaxkv.kv.state import PagedKV, Store
from jaxkv.models.spec import ModelSpec
from jaxkv.weights.tree import Weights, layer_leaf

_MADE_UP = (
    ArithmeticError,
    AttributeError,
    LookupError,
    NotImplementedError,
    TypeError,
    ValueError,
)
"""A description that no engine has written can raise any of these."""


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


def places_of(engine: Engine) -> Places:
    """Returns where this engine keeps its keys and values."""
    return Places(engine.programs.spec, engine.kv.of_model, len(engine.scheduler.config.windows))


def vectors(
    layout: PageLayout, arrays: tuple[np.ndarray, ...], head_dim: int
) -> tuple[np.ndarray, ...]:
    """Returns keys and values [T, K, H] float32, of one layer's pages; keys alone where values are
    in them.
    """
    k, v = layout.unpack([jax.device_put(x[None]) for x in arrays])
    found = [k] if layout.latent_dim is not None else [k, v]
    return tuple(np.asarray(x)[0, ..., :head_dim] for x in found)


def fitted_keys(weights: Weights, places: Places) -> dict[int, np.ndarray]:
    """Returns by which mean and factor, [K, 2, H], the keys of each layer are fitted to being
    quantised (`programs.fit_keys`); nothing where they are not.
    """
    if (leaf := layer_leaf(weights, "k_affine")) is None:
        return {}
    affine_LX = np.asarray(leaf)
    return {
        layer: affine_LX[layer].reshape(-1, 2, head_dim)
        for layer, head_dim in places.head_dims.items()
    }


def stored_as(store: Store) -> str:
    """Returns the dtype in which vectors come into this store: of a quantising codec they are
    rounded once.
    """
    return store.codec.dtype if isinstance(store.codec, PlainCodec) else "float32"


def converted(engine: Engine, saved: SavedPages) -> SavedPages:
    """Returns what was stored by another codec or dtype, with other fitted keys or in pages of
    another layout as vectors by token, as this engine would have stored them but for what the other
    one has rounded.

    Raises: SavedFileError for arrays that are not what the file says of them.
    """
    engine.check_awake()
    places = places_of(engine)
    own = fitted_keys(engine.weights, places)
    layers = {}
    for layer, arrays in saved.layers.items():
        if layer not in places.of:
            raise SavedFileError(f"layers: expected {sorted(places.of)}, got {layer}")
        dtype = stored_as(engine.kv.stores[places.of[layer][1]])
        try:
            if saved.origin.form != BY_TOKEN:
                layout = _layout(saved, layer, arrays)
                arrays = vectors(layout, arrays, places.head_dims[layer])
            k, *v = (x.astype(np.float32) for x in arrays)
            k = _fitted(_unfitted(k, saved.keys.get(layer)), own.get(layer))
        except _MADE_UP as error:
            raise SavedFileError(
                f"layer {layer}: expected pages as described, got {error}"
            ) from error
        layers[layer] = tuple(rounded(x, dtype) for x in (k, *v))
    return replace(saved, origin=replace(saved.origin, form=BY_TOKEN), layers=layers)


def _layout(saved: SavedPages, layer: int, arrays: tuple[np.ndarray, ...]) -> PageLayout:
    """Returns the layout that these arrays are pages of. Raises: ValueError if they are not."""
    layout = layout_of(saved.layouts[layer])
    own = layout.arrays
    num_parts = arrays[0].shape[1] // own[0].shape[0]  # of as many devices
    wanted = [((page.shape[0] * num_parts, *page.shape[1:]), page.dtype) for page in own]
    got = [(x.shape[1:], x.dtype) for x in arrays]
    if got != wanted or layout.page_size != saved.origin.page_size:
        raise ValueError(f"{got} in pages of {layout.page_size}, expected {wanted}")
    return layout


def _unfitted(k_TKH: np.ndarray, affine_K2H: np.ndarray | None) -> np.ndarray:
    """Returns keys as the model makes them."""
    if affine_K2H is None:
        return k_TKH
    mean_KH, factor_KH = np.moveaxis(affine_K2H, 1, 0)
    if not (np.isfinite(affine_K2H).all() and factor_KH.all()):
        raise ValueError("means and factors of keys that are 0 or not finite")
    return k_TKH / factor_KH + mean_KH


def _fitted(k_TKH: np.ndarray, affine_K2H: np.ndarray | None) -> np.ndarray:
    """Returns keys as layers store them that are fitted to being quantised."""
    if affine_K2H is None:
        return k_TKH
    mean_KH, factor_KH = np.moveaxis(affine_K2H, 1, 0)
    return (k_TKH - mean_KH) * factor_KH
