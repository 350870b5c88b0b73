"""Codecs: how the keys and values of a page are stored.

A codec is a frozen, hashable value (it is static under jit). It promises:
- encoding is pure per token and head: the same vector gives the same bytes wherever it lands and
  whatever is beside it, so only elementwise operations, maxima and sums in a fixed order;
- a stored vector is one piece of `width(H)` elements, its scale included, so that a page is one
  contiguous piece;
- `elements` gives attention what it needs without touching every element: a scale of a token and
  head acts on a column of scores and on a softmax weight, an offset on sums of queries and weights,
  and a rotation R on queries before and outputs after, once: R is linear, and orthogonal but for a
  factor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.kv.codecs import parts


class Elements(NamedTuple):
    """Stored vectors as attention takes them: R x = scale * values + offset.

    values [..., H] in the codec's dtype; scale and offset [...] float32, or None for 1 and 0.
    """

    values: jax.Array
    scale: jax.Array | None = None
    offset: jax.Array | None = None


class Codec(ABC):
    """Says how vectors are stored. A subclass is a frozen dataclass; what is not said there is as
    of one that stores bytes and rotates nothing.

    dtype: what elements are for matmuls, bfloat16 or float32.
    """

    __slots__ = ()
    dtype: str

    @property
    @abstractmethod
    def name(self) -> str: ...

    @property
    def storage_dtype(self) -> np.dtype:
        return np.dtype(np.uint8)

    @property
    def fits_keys(self) -> bool:
        """Tells whether it gains by keys without their mean and with channels as large as those of
        the queries that they meet (`programs.fit_keys`). The former changes the scores of a query
        by a constant, which softmax takes out (not beside sinks or under a softcap).
        """
        return False

    @abstractmethod
    def width(self, head_dim: int) -> int:
        """Stored elements of one token and head. Raises: ValueError for a head_dim that it cannot
        store.
        """

    @abstractmethod
    def encode(self, x: jax.Array) -> jax.Array:
        """Float vectors [..., H] -> stored [..., width(H)]."""

    @abstractmethod
    def elements(self, stored: jax.Array) -> Elements:
        """Stored [..., width(H)] -> vectors that are still rotated."""

    def rotate(self, x: jax.Array) -> jax.Array:
        """Queries [..., H] float32 that meet R k as x meets k."""
        return x

    def restore(self, x: jax.Array) -> jax.Array:
        """Returns the x of R x."""
        return x


class RotatingCodec(Codec):
    """Says how vectors are stored that are rotated before (`parts.rotate`)."""

    __slots__ = ()

    @property
    def fits_keys(self) -> bool:
        return True

    def rotate(self, x: jax.Array) -> jax.Array:
        return parts.rotate_query(x)

    def restore(self, x: jax.Array) -> jax.Array:
        return parts.restore(x)


def decode(codec: Codec, stored: jax.Array) -> jax.Array:
    """Returns the vectors [..., H] that a page stands for, float32. Attention takes `elements`."""
    return decode_elements(codec, codec.elements(stored))


def decode_elements(codec: Codec, elements: Elements) -> jax.Array:
    """Returns the vectors [..., H] that elements stand for, float32 and no longer rotated."""
    values, scale, offset = elements
    x = values.astype(jnp.float32)
    x = x if scale is None else x * scale[..., None]
    x = x if offset is None else x + offset[..., None]
    return codec.restore(x)


def bits_per_value(codec: Codec, head_dim: int) -> float:
    """Scales and padding included."""
    return 8 * codec.width(head_dim) * codec.storage_dtype.itemsize / head_dim
