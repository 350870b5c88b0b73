"""Page codecs by name (the `kv_cache_dtype` that people write)."""

from __future__ import annotations

from jaxkv.config import bfloat16_as_bits
from jaxkv.kv.codecs.base import (
    Codec,
    Elements,
    RotatingCodec,
    bits_per_value,
    decode,
    decode_elements,
)
from jaxkv.kv.codecs.int4 import Int4Codec
from jaxkv.kv.codecs.plain import PlainCodec
from jaxkv.kv.codecs.scaled import LARGEST, ScaledCodec
from jaxkv.kv.codecs.turboquant import TurboQuantCodec

PLAIN = ("bfloat16", "float32")
TURBOQUANT = {"turboquant4": (4,), "turboquant3": (3,), "turboquant2.5": (3, 2)}
CODECS = (*PLAIN, *LARGEST, "int4", *TURBOQUANT)
KINDS = {one.__name__: one for one in (PlainCodec, ScaledCodec, Int4Codec, TurboQuantCodec)}
ALIASES = {"bf16": "bfloat16", "f32": "float32", "fp8": "fp8_e4m3"}


def get_codec(name: str, *, platform: str, dtype: str = "bfloat16") -> Codec:
    """Returns the codec called `name`, "auto" being `dtype`, in the form that `platform` (cpu, gpu,
    tpu) handles well.

    dtype: the model's, in which quantised elements meet queries.

    Raises: ValueError for an unknown name, listing the known ones.
    """
    name = dtype if name == "auto" else ALIASES.get(name, name)
    if name in PLAIN:
        return PlainCodec(dtype=name, as_bits=name == "bfloat16" and bfloat16_as_bits(platform))
    if name in LARGEST:
        return ScaledCodec(kind=name, dtype=dtype)
    if name == "int4":
        return Int4Codec(dtype=dtype)
    if name in TURBOQUANT:
        return TurboQuantCodec(num_bits=TURBOQUANT[name], dtype=dtype)
    raise ValueError(f"kv_cache_dtype: expected auto or one of {', '.join(CODECS)}, got {name!r}")


__all__ = [
    "CODECS",
    "KINDS",
    "Codec",
    "Elements",
    "PlainCodec",
    "RotatingCodec",
    "ScaledCodec",
    "bits_per_value",
    "decode",
    "decode_elements",
    "get_codec",
]
