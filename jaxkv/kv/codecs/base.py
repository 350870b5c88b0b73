"""Codecs: how the keys and values of a page are stored.

A codec is a frozen, hashable value (it is static under jit). It promises:
- `decode(encode(x))` has x's shape, and equals x up to the codec's stated rounding;
- encoding is per element group inside one token, so that the same key and value give the same bytes wherever they land;
- stored arrays keep the trailing axes `[..., S, H]`, so a page is one contiguous piece of memory.
"""

from __future__ import annotations

from typing import Protocol

import jax
import numpy as np


class Codec(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def storage_dtype(self) -> np.dtype: ...

    def encode(self, x: jax.Array) -> jax.Array:
        """Float values of any shape -> the stored representation of the same shape."""
        ...

    def decode(self, stored: jax.Array) -> jax.Array:
        """Stored values of any shape -> float values of the same shape."""
        ...
