"""Unquantised pages: float32 as it is, bfloat16 as it is or as raw bits."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.kv.codecs.base import Codec, Elements


@dataclass(frozen=True, kw_only=True, slots=True)
class PlainCodec(Codec):
    """Stores values rounded to `dtype`; `as_bits` keeps bfloat16 as uint16 (see
    `config.bfloat16_as_bits`).
    """

    dtype: str
    as_bits: bool = False

    @property
    def name(self) -> str:
        return self.dtype

    @property
    def storage_dtype(self) -> np.dtype:
        return np.dtype(np.uint16) if self.as_bits else jnp.dtype(self.dtype)

    def width(self, head_dim: int) -> int:
        return head_dim

    def encode(self, x: jax.Array) -> jax.Array:
        x = x.astype(self.dtype)
        return jax.lax.bitcast_convert_type(x, jnp.uint16) if self.as_bits else x

    def elements(self, stored: jax.Array) -> Elements:
        return Elements(
            jax.lax.bitcast_convert_type(stored, self.dtype) if self.as_bits else stored
        )
