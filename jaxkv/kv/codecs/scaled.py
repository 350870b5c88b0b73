"""One byte per value and a scale per token and head: int8 and the two fp8 formats."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxkv.kv.codecs.base import Codec, Elements
from jaxkv.kv.codecs.parts import SMALLEST, as_bytes, of_bytes, to_bfloat16

LARGEST = {"int8": 127.0, "fp8_e4m3": 448.0, "fp8_e5m2": 57344.0}
STORED = {"int8": jnp.int8, "fp8_e4m3": jnp.float8_e4m3fn, "fp8_e5m2": jnp.float8_e5m2}


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaledCodec(Codec):
    """Stores of each vector: H values of one byte, and the bfloat16 that the largest of them stands
    for, divided by `LARGEST`.

    kind: int8, fp8_e4m3 or fp8_e5m2. dtype: in which matmuls take them, bfloat16 or float32 (both
    hold them all).
    """

    kind: str
    dtype: str

    @property
    def name(self) -> str:
        return self.kind

    @property
    def fits_keys(self) -> bool:
        return self.kind == "int8"  # a float needs no channels of one size

    def width(self, head_dim: int) -> int:
        return head_dim + 2

    def quantise(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns (values [..., H], scale [...]) of float vectors [..., H]."""
        x, largest = x.astype(jnp.float32), LARGEST[self.kind]
        scale = jnp.maximum(to_bfloat16(jnp.max(jnp.abs(x), axis=-1) / largest), SMALLEST)
        # The rounded scale may be a little small for the largest value.
        values = jnp.clip(x / scale[..., None], -largest, largest)
        values = jnp.round(values) if self.kind == "int8" else values
        return values.astype(STORED[self.kind]), scale

    def encode(self, x: jax.Array) -> jax.Array:
        values, scale = self.quantise(x)
        stored = jax.lax.bitcast_convert_type(values, jnp.uint8)
        return jnp.concatenate([stored, as_bytes(scale)], axis=-1)

    def elements(self, stored: jax.Array) -> Elements:
        values = jax.lax.bitcast_convert_type(stored[..., :-2], STORED[self.kind])
        return Elements(values.astype(self.dtype), of_bytes(stored[..., -2:]))
